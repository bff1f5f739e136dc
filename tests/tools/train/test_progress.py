"""Progress on standard output."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from zeropp.tools.train.progress import LiveProgress, PlainProgress
from zeropp.tools.train.run_events import Evaluation, RunInfo, StepRecord, Summary

INFO = RunInfo({}, 1_234_567, 4, 2, "cpu", {}, first_step=1)
SUMMARY = Summary(4, True, 300 * 2**20, 2**20, "runs/x/checkpoints/step-00000004")


def record(step: int) -> StepRecord:
    return StepRecord(step, 2.5, 1.0, 1e-3, 0.5, 1000, 8_000_000, 4_000_000, 0.125)


def test_plain_lines_every_few_steps() -> None:
    out = StringIO()
    progress = PlainProgress(Console(file=out, width=200), steps=4, every=3)
    progress.on_start(INFO)
    for step in (1, 2, 3, 4):
        progress.on_step(record(step))
    progress.on_evaluation(Evaluation(4, 2.25))
    progress.on_end(SUMMARY)
    lines = out.getvalue().splitlines()
    assert lines[0] == "1,234,567 parameters, 4 ranks on 2 nodes, cpu"
    assert lines[1] == ("step 3/4  loss 2.5000  2,000 tokens/s  8.00 MB/s across nodes  MFU 12.5%  left 0:00")
    assert lines[2].startswith("step 4/4")
    assert lines[3] == "step 4/4  validation loss 2.2500"
    assert "peak memory 300 MiB per rank, of which zeropp uses 1.0 MiB" in lines[4]
    assert len(lines) == 5


def test_a_progress_bar_with_metrics() -> None:
    out = StringIO()
    progress = LiveProgress(Console(file=out, width=140, force_terminal=True), steps=4)
    progress.on_start(INFO)
    progress.on_step(record(1))
    progress.on_step(record(2))
    progress.on_note("stopped by SIGINT")
    progress.close()
    shown = out.getvalue()
    assert "2/4" in shown
    assert "loss 2.5000" in shown
    assert "MB/s across nodes" in shown
    assert "stopped by SIGINT" in shown
