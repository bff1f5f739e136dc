"""Comparison of training runs, from their metrics files, as tables and sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean

from rich.table import Table

from ..train.metrics import FILE_NAME, Metrics

COLUMNS = (
    "",
    "steps",
    "loss",
    "validation loss",
    "vs first",
    "bytes across nodes",
    "per parameter",
    "less by",
    "tokens/s",
    "peak MiB",
    "zeropp keeps MiB",
)
EXPLANATION = (
    "loss: mean of the last ten steps. vs first: difference of the validation loss from the first run. "
    "bytes: sent between nodes, per node and step, from zeropp's ledger. less by: ratio to the first run. "
    "tokens/s: of the median step. peak: memory of the rank with the most (on a CPU: resident memory minus "
    "that at the start). zeropp keeps: node shards, pending gradients and buffers, which are part of the "
    "peak"
)
MIB = 2**20
MUST_MATCH: dict[str, Callable[[Metrics], object]] = {
    "ranks": lambda run: run.info.ranks,
    "nodes": lambda run: run.info.nodes,
    "device": lambda run: run.info.device,
    "parameters": lambda run: run.info.parameters,
    "tokens per step": lambda run: run.steps[-1].tokens,
    "last step": lambda run: run.steps[-1].step,
}
"""Properties that are equal in a fair comparison."""


def read_runs(paths: list[Path]) -> dict[str, Metrics]:
    """Return the runs by name: that of the folder or the file, or the whole path if names repeat."""
    files = [path / FILE_NAME if path.is_dir() else path for path in paths]
    names = [file.parent.name if file.name == FILE_NAME else file.stem for file in files]
    if len(set(names)) < len(names):
        names = [str(file) for file in files]
    return {name: Metrics(file) for name, file in zip(names, files, strict=True)}


def compare_lines(runs: Mapping[str, Metrics]) -> list[list[str]]:
    """Return a header, and the text of every run. The first run is the reference for the others."""
    first = next(iter(runs.values()))
    lines = [list(COLUMNS)]
    for name, run in runs.items():
        sent, sent_first = bytes_per_node(run), bytes_per_node(first)
        lines.append(
            [
                name,
                str(run.steps[-1].step),
                f"{mean(record.loss for record in run.steps[-10:]):.4f}",
                f"{run.evaluations[-1].validation_loss:.4f}" if run.evaluations else "-",
                _difference(run, first),
                f"{sent:,.0f}",
                f"{sent / run.info.parameters:.2f}",
                f"{sent_first / sent:.1f}x" if sent and run is not first else "-",
                f"{run.tokens_per_second:,.0f}",
                f"{run.end.peak_bytes / MIB:,.0f}" if run.end else "-",
                f"{run.end.communication_bytes / MIB:,.1f}" if run.end else "-",
            ]
        )
    return lines


def compare_table(runs: Mapping[str, Metrics]) -> Table:
    header, *lines = compare_lines(runs)
    shown = Table(caption=EXPLANATION, caption_justify="left")
    for number, column in enumerate(header):
        shown.add_column(column, justify="right" if number else "left")
    for line in lines:
        shown.add_row(*line)
    return shown


def differences(runs: Mapping[str, Metrics]) -> list[str]:
    """Return sentences about properties other than zeropp's Config that differ between the runs."""
    sentences = []
    for quantity, value_of in MUST_MATCH.items():
        values = {name: value_of(run) for name, run in runs.items()}
        if len(set(values.values())) > 1:
            each = ", ".join(f"{name} {value}" for name, value in values.items())
            sentences.append(f"the runs differ in {quantity}: {each}")
    return sentences


def loss_curves(runs: Mapping[str, Metrics], points: int = 8) -> Table:
    """Return a table of losses at a few steps. Each is the mean over the steps since the previous one."""
    shown = Table(title="training loss, mean over the preceding steps")
    shown.add_column("step", justify="right")
    for name in runs:
        shown.add_column(name, justify="right")
    last = min(run.steps[-1].step for run in runs.values())
    ends = sorted({round(last * (point + 1) / points) for point in range(points)} - {0})
    for start, end in zip([0, *ends], ends, strict=False):
        means = [
            mean(record.loss for record in run.steps if start < record.step <= end) for run in runs.values()
        ]
        shown.add_row(str(end), *(f"{value:.4f}" for value in means))
    return shown


def result_sentence(plain: Metrics, ours: Metrics, has_network: bool) -> str:
    """Return the result of the demonstration: loss, bytes and speed."""
    losses = [run.evaluations[-1].validation_loss for run in (ours, plain)]
    fewer = bytes_per_node(plain) / bytes_per_node(ours)
    speed = f"{ours.tokens_per_second / plain.tokens_per_second:.1f}x the tokens per second"
    loss = f"zeropp: validation loss {losses[0]:.2f} (plain FSDP2 {losses[1]:.2f})"
    sent = f"{fewer:.1f}x fewer bytes between nodes"
    if has_network:
        return f"{loss}, {sent}, {speed}."
    return f"{loss}, {sent}. There is no network to measure here: on local ranks, {speed}."


def bytes_per_node(run: Metrics) -> float:
    return run.across_bytes_per_step / run.info.nodes


def _difference(run: Metrics, first: Metrics) -> str:
    if run is first or not run.evaluations or not first.evaluations:
        return "-"
    ratio = run.evaluations[-1].validation_loss / first.evaluations[-1].validation_loss
    return f"{ratio - 1:+.2%}"
