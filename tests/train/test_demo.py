"""Where the demonstration runs, and what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeropp.lab import JobError
from zeropp.train.demo import MARK, Lab, LocalRanks, find_place, replace_folders, run_demo, steps_done
from zeropp.train.metrics import FILE_NAME

SCRIPT = """
import os, signal, sys
with open(os.environ["OUT"] + "/" + os.environ["RANK"], "w") as file:
    file.write(os.environ["LOCAL_WORLD_SIZE"] + " " + " ".join(sys.argv[1:]))
if sys.argv[1] == "SIGILL" and os.environ["RANK"] == "2":
    os.kill(os.getpid(), signal.SIGILL)
"""


def test_a_lab_where_namespaces_are_possible() -> None:
    with find_place("1gbit") as place:
        assert isinstance(place, Lab)
        assert place.description == "2 nodes x 2 ranks in network namespaces, 1gbit links"


def test_four_local_ranks_play_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    place = LocalRanks("no namespaces")
    seconds = []
    place.run([str(script), "0"], lambda: seconds.append(1))
    assert {(tmp_path / str(rank)).read_text() for rank in range(4)} == {"4 0 --zeropp.node-size 2"}
    assert seconds
    says = r"(?s)rank 2 was ended by SIGILL \(illegal instruction\).*Try: set ONEDNN_MAX_CPU_ISA"
    with pytest.raises(JobError, match=says):
        place.run([str(script), "SIGILL"], lambda: None)


def test_steps_are_counted_while_a_run_goes_on(tmp_path: Path) -> None:
    assert steps_done(tmp_path) == 0
    (tmp_path / FILE_NAME).write_text('{"kind": "start"}\n{"kind": "step", "step": 1}\n{"kind": "step", "st')
    assert steps_done(tmp_path) == 2


def test_nothing_is_deleted_that_no_demonstration_has_made(tmp_path: Path) -> None:
    """`--folder .` in a clone: the package is called zeropp, like one of the runs."""
    plain, ours = tmp_path / "plain-FSDP2", tmp_path / "zeropp"
    package = ours / "__init__.py"
    ours.mkdir()
    package.touch()
    with pytest.raises(ValueError, match="zeropp is not of an earlier demonstration"):
        run_demo(tmp_path, 1, LocalRanks("nothing is run"), lambda *_: None)
    assert package.exists()
    assert not plain.exists()
    package.unlink()
    replace_folders([plain, ours])
    left_over = ours / "checkpoint"
    left_over.touch()
    replace_folders([plain, ours])
    assert not left_over.exists()
    (ours / MARK).rename(ours / FILE_NAME)  # of a run of `zeropp train`
    with pytest.raises(ValueError, match="zeropp is not of an earlier demonstration"):
        replace_folders([plain, ours])
    (ours / FILE_NAME).unlink()
    ours.rmdir()
    ours.touch()
    with pytest.raises(ValueError, match="zeropp is a file"):
        replace_folders([plain, ours])
