"""The demonstration: how it starts ranks, and the folders that it replaces."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp.tools.lab import JobError
from zeropp.tools.lab.link_properties import MAX_RATE_BIT_S, MIN_RATE_BIT_S, parse_rate_bit_s
from zeropp.tools.train.demo import (
    MARK,
    OPEN_LINKS,
    RUNS,
    LabLauncher,
    LocalLauncher,
    OpenStep,
    expected_parts,
    make_folders,
    open_launcher,
    steps_done,
)
from zeropp.tools.train.metrics import FILE_NAME

SCRIPT = """
import os, signal, sys
with open(os.environ["OUT"] + "/" + os.environ["RANK"], "w") as file:
    file.write(os.environ["LOCAL_WORLD_SIZE"] + " " + " ".join(sys.argv[1:]))
if sys.argv[1] == "SIGILL" and os.environ["RANK"] == "2":
    os.kill(os.getpid(), signal.SIGILL)
"""


def test_a_lab_where_namespaces_are_possible() -> None:
    with open_launcher("1gbit") as launcher:
        assert isinstance(launcher, LabLauncher)
        assert launcher.description == "2 nodes x 2 ranks in network namespaces, 1gbit links"


def test_links_have_no_limit_until_one_is_chosen() -> None:
    with open_launcher("auto") as launcher:
        assert isinstance(launcher, LabLauncher)
        assert launcher.description == "2 nodes x 2 ranks in network namespaces, unlimited links"
        launcher.cluster.set_link(link=OpenStep(0.3, 10_000_000).link)
        assert launcher.description == "2 nodes x 2 ranks in network namespaces, 114mbit links"


@pytest.mark.parametrize("link", ["fast", "Auto", "0gbit"])
def test_an_invalid_link_is_named(link: str) -> None:
    with (
        pytest.raises(ValueError, match=f"link is '{link}'; expected a rate .* 'unlimited', or 'auto'"),
        open_launcher(link),
    ):
        pass


@given(seconds=st.floats(1e-4, 1e4), node_bytes=st.floats(1.0, 1e13))
def test_seven_tenths_of_a_step_are_spent_on_the_chosen_link(seconds: float, node_bytes: float) -> None:
    rate_bit_s = parse_rate_bit_s(OpenStep(seconds, node_bytes).link)
    assert rate_bit_s is not None
    line_seconds = 8 * node_bytes / rate_bit_s
    share = line_seconds / (seconds + line_seconds)
    if rate_bit_s == MIN_RATE_BIT_S:  # of the lab: the exact rate may be lower
        assert share < 0.705
    elif rate_bit_s == MAX_RATE_BIT_S:
        assert share > 0.695
    else:
        assert share == pytest.approx(0.7, abs=0.005)  # a rate has three digits


def test_the_expected_time_has_all_runs_in_their_order() -> None:
    assert list(expected_parts(80, chooses_link=True)) == [OPEN_LINKS, *RUNS]
    assert list(expected_parts(80, chooses_link=False)) == list(RUNS)


def test_four_local_ranks_simulate_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = LocalLauncher("no namespaces")
    seconds = []
    launcher.run([str(script), "0"], lambda: seconds.append(1))
    assert {(tmp_path / str(rank)).read_text() for rank in range(4)} == {"4 0 --zeropp.node-size 2"}
    assert seconds
    message = r"(?s)rank 2 was ended by SIGILL \(illegal instruction\).*Try: set ONEDNN_MAX_CPU_ISA"
    with pytest.raises(JobError, match=message):
        launcher.run([str(script), "SIGILL"], lambda: None)


def test_steps_of_an_unfinished_run_are_counted(tmp_path: Path) -> None:
    assert steps_done(tmp_path) == 0
    (tmp_path / FILE_NAME).write_text('{"kind": "start"}\n{"kind": "step", "step": 1}\n{"kind": "step", "st')
    assert steps_done(tmp_path) == 2


def test_only_folders_of_a_demonstration_are_deleted(tmp_path: Path) -> None:
    """With `--folder .` in a clone: the package is called zeropp, like one of the runs."""
    plain, ours = tmp_path / "plain-FSDP2", tmp_path / "zeropp"
    package = ours / "__init__.py"
    ours.mkdir()
    package.touch()
    with pytest.raises(ValueError, match="zeropp would be replaced, but no demonstration has made it"):
        make_folders(tmp_path, RUNS)
    assert package.exists()
    assert not plain.exists()
    package.unlink()
    assert make_folders(tmp_path, RUNS) == {"plain FSDP2": plain, "zeropp": ours}
    left_over = ours / "checkpoint"
    left_over.touch()
    make_folders(tmp_path, RUNS)
    assert not left_over.exists()
    (ours / MARK).rename(ours / FILE_NAME)  # now it looks like a run of `zeropp train`
    with pytest.raises(ValueError, match="zeropp would be replaced, but no demonstration has made it"):
        make_folders(tmp_path, RUNS)
    (ours / FILE_NAME).unlink()
    ours.rmdir()
    ours.touch()
    with pytest.raises(ValueError, match="zeropp is a file"):
        make_folders(tmp_path, RUNS)
