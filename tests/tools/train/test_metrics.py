"""The file of metrics, across restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeropp.tools.train.metrics import FILE_NAME, Metrics, MetricsFile
from zeropp.tools.train.run_events import Evaluation, RunInfo, StepRecord, Summary


def info(first_step: int = 1) -> RunInfo:
    return RunInfo({"zeropp": {}}, 1000, 4, 2, "cpu", {"torch": "0"}, first_step)


def record(step: int, loss: float = 1 / 3) -> StepRecord:
    return StepRecord(step, loss, 1.0, 1e-3, 0.5, 100, 80, 40, None)


def write(folder: Path, first: int, last: int, loss: float = 1 / 3) -> None:
    file = MetricsFile(folder)
    file.on_start(info(first))
    for step in range(first, last + 1):
        file.on_step(record(step, loss))
        if step % 2 == 0:
            file.on_evaluation(Evaluation(step, loss))


def test_metrics_are_read_bit_for_bit(tmp_path: Path) -> None:
    write(tmp_path, 1, 3)
    MetricsFile(tmp_path).on_end(Summary(3, True, 10, 5, "c"))
    metrics = Metrics(tmp_path / FILE_NAME)
    assert metrics.info == info()
    assert metrics.steps == [record(1), record(2), record(3)]
    assert metrics.evaluations == [Evaluation(2, 1 / 3)]
    assert metrics.end == Summary(3, True, 10, 5, "c")
    assert metrics.across_bytes_per_step == 40
    assert metrics.tokens_per_second == 200


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 1, 6, loss=1.0)
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"kind": "step", "st')  # the writer was killed here
    write(tmp_path, 5, 7, loss=2.0)
    metrics = Metrics(tmp_path / FILE_NAME)
    assert [(r.step, r.loss) for r in metrics.steps] == [
        *[(step, 1.0) for step in range(1, 5)], *[(step, 2.0) for step in range(5, 8)]
    ]  # fmt: skip
    assert [e.step for e in metrics.evaluations] == [2, 4, 6]
    assert [start.first_step for start in metrics.starts] == [1, 5]


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    with pytest.raises(ValueError, match=r"other\.jsonl cannot be read"):
        Metrics(path)
    path.write_text("")
    with pytest.raises(ValueError, match=r"other\.jsonl has no steps"):
        Metrics(path)
    path.write_text("hello\n")
    with pytest.raises(ValueError, match=r"line 1 is 'hello\\n'; expected a line of zeropp train"):
        Metrics(path)
    path.write_text('{"kind": "step", "step": 1}\n')
    with pytest.raises(ValueError, match="has a 'step' line without 'loss'"):
        Metrics(path)
