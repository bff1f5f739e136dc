"""TensorBoard's files, read back with its reader."""

from __future__ import annotations

from pathlib import Path

from zeropp.tools.train.run_events import Evaluation, RunInfo, StepRecord
from zeropp.tools.train.tensorboard import TensorBoard


def write(folder: Path, first: int, last: int, loss: float) -> None:
    board = TensorBoard(folder)
    board.on_start(RunInfo({}, 1, 1, 1, "cpu", {}, first_step=first))
    for step in range(first, last + 1):
        board.on_step(StepRecord(step, loss, 1.0, 1e-3, 0.5, 100, 8, 4, None))
    board.on_evaluation(Evaluation(last, loss))
    board.close()


def test_a_resumed_run_hides_the_steps_that_it_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    write(tmp_path, 1, 6, loss=1.0)
    write(tmp_path, 5, 7, loss=2.0)
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    losses = [(event.step, event.value) for event in reader.Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0), (7, 2.0)]
    assert reader.Scalars("train/tokens_per_second")[0].value == 200.0
    assert [event.step for event in reader.Scalars("validation/loss")] == [7]
    assert "train/flops_utilisation" not in reader.Tags()["scalars"]
