"""Progress on standard output of the first rank: a progress bar on a terminal, else lines of text."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..._text import count
from .run_events import Evaluation, RunInfo, RunListener, StepRecord, Summary

MIB = 2**20


def make_progress(steps: int, every: int) -> RunListener:
    """Return the listener for standard output: a progress bar on a terminal, else lines of text."""
    console = Console(highlight=False, soft_wrap=True)
    return LiveProgress(console, steps) if console.is_terminal else PlainProgress(console, steps, every)


class PlainProgress(RunListener):
    """Prints a line every `every` steps."""

    def __init__(self, console: Console, steps: int, every: int) -> None:
        self._console, self._steps, self._every = console, steps, every
        self._started: tuple[int, float] | None = None  # step and time; the slow first step does not count

    def on_start(self, info: RunInfo) -> None:
        self._print(describe(info))

    def on_step(self, record: StepRecord) -> None:
        if self._started is None:
            self._started = (record.step, time.monotonic())
        if record.step % self._every == 0 or record.step == self._steps:
            self._print(f"step {record.step}/{self._steps}  {figures(record)}{self._left(record.step)}")

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._print(f"step {evaluation.step}/{self._steps}  validation loss {evaluation.validation_loss:.4f}")

    def on_note(self, text: str) -> None:
        self._print(text)

    def on_end(self, summary: Summary) -> None:
        self._print(describe_end(summary))

    def _left(self, step: int) -> str:
        assert self._started is not None
        first, at = self._started
        if step == first:
            return ""
        seconds = (time.monotonic() - at) / (step - first) * (self._steps - step)
        return f"  left {int(seconds) // 60}:{int(seconds) % 60:02d}"

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False)


class LiveProgress(RunListener):
    """A progress bar in the last line; notes and evaluations are printed above it."""

    def __init__(self, console: Console, steps: int) -> None:
        self._steps = steps
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TextColumn("left"))
        self._progress = Progress(*columns, TimeRemainingColumn(), console=console, speed_estimate_period=300)
        self._task = self._progress.add_task("starting", total=steps)
        self._progress.start()

    def on_start(self, info: RunInfo) -> None:
        self._progress.console.print(describe(info), markup=False)
        self._progress.reset(self._task, completed=info.first_step - 1)

    def on_step(self, record: StepRecord) -> None:
        self._progress.update(self._task, completed=record.step, description=figures(record))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        text = f"step {evaluation.step}: validation loss {evaluation.validation_loss:.4f}"
        self._progress.console.print(text, markup=False)

    def on_note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, style="dim")

    def on_end(self, summary: Summary) -> None:
        self._progress.stop()
        self._progress.console.print(describe_end(summary), markup=False)

    def close(self) -> None:
        self._progress.stop()


def describe(info: RunInfo) -> str:
    ranks = f"{count(info.ranks, 'rank')} on {count(info.nodes, 'node')}"
    return f"{info.parameters:,} parameters, {ranks}, {info.device}"


def figures(record: StepRecord) -> str:
    """Return loss, speed and traffic of a step in one line."""
    used = "" if record.flops_utilisation is None else f"  MFU {record.flops_utilisation:.1%}"
    return (
        f"loss {record.loss:.4f}  {record.tokens_per_second:,.0f} tokens/s  "
        f"{record.across_bytes_per_second / 1e6:,.2f} MB/s across nodes{used}"
    )


def describe_end(summary: Summary) -> str:
    state = "done" if summary.is_complete else "stopped"
    memory = f"peak memory {summary.peak_bytes / MIB:,.0f} MiB per rank"
    return (
        f"{state} after step {summary.step}; {memory}, of which zeropp uses "
        f"{summary.communication_bytes / MIB:,.1f} MiB; checkpoint: {summary.checkpoint}"
    )
