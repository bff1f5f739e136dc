"""Tables of the benchmark, as text and as rich tables."""

from __future__ import annotations

from rich.table import Table

from ..bench.profile import PARTS
from ..bench.results import Cell, Results
from ..strategies import BASELINE, DEFAULT, STRATEGIES

MIB = 2**20
COLUMNS = (
    "",
    "step ms",
    "vs baseline",
    "limit ms",
    "step / limit",
    "cores ms",
    "bytes",
    "ledger",
    "loss",
    "peak MiB",
    "state",
    "comm.",
)
EXPLANATION = (
    "step: median ± half the interquartile range. vs baseline: throughput. limit: compute + wire bytes / "
    "line rate; with overlap, in each phase the longer of the two plus the part that cannot be hidden; at "
    "least cores. cores: CPU time of all ranks / cores of this machine. bytes: sent per node, parameter "
    "and step, from the interface counters. ledger: the same from zeropp's ledger. loss: of a longer run "
    "on the same data. peak: resident memory of a rank minus that at its start. state: model state "
    "(weights, gradients, optimizer). comm.: communication state. fp32 strategies use gloo's "
    "reduce-scatter, which sends twice the bytes of a ring. *: best of its column. Parts of overlapped "
    "strategies run concurrently with compute: only wait adds to the step time"
)


def bench_tables(results: Results) -> list[Table]:
    """Return two tables for each number of micro-batches: the results, and the parts of a step."""
    tables = []
    for micro_batches in results.micro_batches():
        title = (
            f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''} per step; {results.describe()}"
        )
        tables.append(as_table(title, [list(COLUMNS), *main_lines(results, micro_batches)]))
        tables.append(as_table(f"parts of a step, ms ({micro_batches})", parts_lines(results, micro_batches)))
    return tables


def main_lines(results: Results, micro_batches: int) -> list[list[str]]:
    """Return the text of every strategy and column. The best of a column has a star."""
    measured = [cell for _, cell in results.measured(micro_batches)]
    fastest = min(measured, key=lambda cell: cell.median_ms, default=None)
    fewest = min(measured, key=lambda cell: cell.sent_bytes, default=None)
    smallest = min(measured, key=lambda cell: cell.peak_bytes, default=None)
    lines = []
    for strategy in STRATEGIES:
        cell = results.cell(strategy.name, micro_batches)
        if cell is None:
            if strategy.name in results.failed:
                lines.append([strategy.title, "not run", *[""] * (len(COLUMNS) - 2)])
            continue
        limit_ms, speedup, loss = (
            results.limit_ms(cell),
            results.speedup(cell),
            results.final_loss(strategy.name),
        )
        lines.append(
            [
                strategy.title,
                f"{cell.median_ms:.0f} ± {cell.median_ms * cell.spread:.0f}{_star(cell is fastest)}",
                "-" if speedup is None else f"{speedup:.2f}x",
                f"{limit_ms:.0f}",
                f"{cell.median_ms / limit_ms:.2f}",
                f"{cell.cores_ms:.0f}",
                f"{cell.sent_bytes / results.parameters:.2f}{_star(cell is fewest)}",
                "-" if cell.ledger_bytes is None else f"{cell.ledger_bytes / results.parameters:.2f}",
                "-" if loss is None else f"{loss:.4f}",
                f"{cell.peak_bytes / MIB:.0f}{_star(cell is smallest)}",
                f"{cell.model_state_bytes / MIB:.0f}",
                f"{cell.communication_bytes / MIB:.0f}",
            ]
        )
    return lines


def parts_lines(results: Results, micro_batches: int) -> list[list[str]]:
    """Return a header, and the milliseconds of each strategy in every used part."""
    cells = results.measured(micro_batches)
    parts = [part for part in PARTS if any(cell.parts_ms.get(part) for _, cell in cells)]
    lines = [["", *parts]]
    for strategy, cell in cells:
        lines.append([strategy.title, *(_milliseconds(cell, part) for part in parts)])
    return lines


def style_of(title: str) -> str:
    """Return the rich style of a strategy's line."""
    names = {strategy.title: strategy.name for strategy in STRATEGIES}
    return {DEFAULT: "bold green", BASELINE: "bold"}.get(names.get(title, ""), "")


def _milliseconds(cell: Cell, part: str) -> str:
    value = cell.parts_ms.get(part, 0.0)
    return f"{value:.0f}" if value >= 0.5 else ""


def _star(is_best: bool) -> str:
    return " *" if is_best else ""


def as_table(title: str, lines: list[list[str]]) -> Table:
    table = Table(title=title)
    for number, column in enumerate(lines[0]):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for line in lines[1:]:
        table.add_row(*line, style=style_of(line[0]))
    return table
