"""Runs that resume from an older checkpoint, on real ranks: no step is lost or mixed with another run's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.ranks import Ranks
from tests.tools.train.runs import small_run, train_here
from zeropp.tools.train.branch import keep_branch
from zeropp.tools.train.checkpoint import name_of, steps_in
from zeropp.tools.train.config import CheckpointConfig
from zeropp.tools.train.metrics import FILE_NAME, Metrics


def steps_of(folder: Path) -> list[int]:
    return [record.step for record in Metrics(folder / FILE_NAME).steps]


def test_checkpoints_after_the_resumed_one_move_to_a_branch(ranks: Ranks, tmp_path: Path) -> None:
    run = small_run(tmp_path, checkpoint=CheckpointConfig(every=2, keep=3))
    ranks.run(train_here, run, world=2)
    checkpoints, branch = tmp_path / "checkpoints", tmp_path / "branch-1"
    assert sorted(steps_in(checkpoints)) == [4, 6, 8]
    whole = (tmp_path / FILE_NAME).read_text()

    again = replace(run, steps=7, resume=str(checkpoints / name_of(4)))
    summary = ranks.run(train_here, again, world=2)[0]
    assert summary.checkpoint == str(checkpoints / name_of(7))
    assert sorted(steps_in(checkpoints)) == [4, 6, 7]
    assert steps_of(tmp_path) == list(range(1, 8))
    assert sorted(steps_in(branch / "checkpoints")) == [6, 8]
    assert (branch / FILE_NAME).read_text() == whole

    # `auto` resumes the new run, and in the branch's folder the old one.
    assert ranks.run(train_here, replace(run, steps=9), world=2)[0].step == 9
    assert [start.first_step for start in Metrics(tmp_path / FILE_NAME).starts] == [1, 5, 8]
    old = replace(run, folder=branch, steps=9)
    assert ranks.run(train_here, old, world=2)[0].step == 9
    assert [start.first_step for start in Metrics(branch / FILE_NAME).starts] == [1, 9]


def test_resuming_from_the_last_checkpoint_makes_no_branch(tmp_path: Path) -> None:
    last = tmp_path / "checkpoints" / name_of(8)
    last.mkdir(parents=True)
    (tmp_path / FILE_NAME).touch()
    assert keep_branch(tmp_path, last, 8) is None
    assert keep_branch(tmp_path / "new", last, 8) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", FILE_NAME]


def test_resuming_from_another_folder_moves_the_whole_run_to_a_branch(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere" / "checkpoints" / name_of(8)
    (here / "checkpoints" / name_of(2)).mkdir(parents=True)
    (here / FILE_NAME).write_text("lines")
    for number in (1, 2):
        branch = keep_branch(here, elsewhere, 8)
        assert branch == here / f"branch-{number}"
        assert steps_in(branch / "checkpoints") == [2]
        assert (branch / FILE_NAME).read_text() == "lines"
        assert steps_in(here / "checkpoints") == []
        assert not (here / FILE_NAME).exists()
        assert keep_branch(here, elsewhere, 8) is None
        (here / "checkpoints" / name_of(2)).mkdir()
        (here / FILE_NAME).write_text("lines")
