"""Tables of step times in the lab for README and docs, from the numbers in docs/data.

    python benchmarks/lab_tables.py

`zeropp lab bench --json` has written each bench-NAME.json. docs/lab-results.md has the command above each
table, and `zeropp lab bench --show docs/data/bench-NAME.json` prints all numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from zeropp.tools.bench.results import Cell, Results
from zeropp.tools.strategies import DEFAULT, Strategy, find_strategy

ROOT = Path(__file__).parents[1]
MIB = 2**20
IN_README = ("fsdp2", "wire16", "wire16-overlap", "hsdp", "hfsdp", "paper", "default", "four-bit")


def main() -> None:
    for page, tables in all_tables().items():
        for rows in tables:
            print(f"\n{page}\n" + "\n".join(rows))


def all_tables() -> dict[str, list[list[str]]]:
    """Return the tables of each page, as lists of lines."""
    runs = {path.stem: Results.load(path) for path in sorted((ROOT / "docs" / "data").glob("bench-*.json"))}
    slow, paper, fast = (runs[f"bench-{name}"] for name in ("slow", "paper", "fast"))
    return {
        "README.md": [throughput_table(paper)],
        "docs/choose.md": [regimes_table([slow, paper, fast])],
        "docs/lab-results.md": [
            table
            for results in runs.values()
            for table in (steps_table(results), *([losses_table(results)] if results.losses else []))
        ],
    }


def throughput_table(results: Results) -> list[str]:
    """Return throughput and bytes of the main strategies."""
    counts = results.micro_batches()
    rows = []
    for strategy in map(find_strategy, IN_README):
        cells = [results.cell(strategy.name, count) for count in counts]
        speedups = [_times(results, strategy, count)[1] for count in counts]
        rows.append([title(strategy), *speedups, " and ".join(_bytes(results, cell) for cell in cells)])
    heads = ["micro-batches per step", *map(str, counts), f"bytes, at {' and '.join(map(str, counts))}"]
    return _table(heads, rows)


def regimes_table(runs: Sequence[Results]) -> list[str]:
    """Return speedups of four strategies by the share of communication, as a help to choose."""
    compared = [find_strategy(name) for name in ("wire16-overlap", "hsdp", "hfsdp", "default")]
    rows = [
        [
            f"{results.wanted_share:.0%}",
            str(count),
            *(_times(results, strategy, count)[1] for strategy in compared),
        ]
        for results in runs
        for count in results.micro_batches()
    ]
    return _table(["communication", "micro-batches", *(strategy.title for strategy in compared)], rows)


def steps_table(results: Results) -> list[str]:
    """Return step times, relative to the baseline and to the limit."""
    counts = results.micro_batches()
    heads = [
        "",
        *chain.from_iterable((f"{count}: step, ms", "vs baseline", "step / limit") for count in counts),
    ]
    rows = [
        [title(strategy), *(cell for count in counts for cell in _times(results, strategy, count))]
        for strategy, _ in results.measured(counts[0])
    ]
    if len(counts) == 1:  # the table has room for bytes
        heads.append("bytes")
        for row, (_, cell) in zip(rows, results.measured(counts[0]), strict=True):
            row.append(_bytes(results, cell))
    return _table(heads, rows)


def losses_table(results: Results) -> list[str]:
    """Return bytes for each number of micro-batches, and loss and memory for the first one."""
    counts = results.micro_batches()
    heads = [
        "",
        f"bytes, at {' and '.join(map(str, counts))}",
        "loss",
        "peak, MiB",
        "model state",
        "communication",
    ]
    rows = []
    for strategy, first in results.measured(counts[0]):
        cells = [results.cell(strategy.name, count) for count in counts]
        loss = results.final_loss(strategy.name)
        rows.append(
            [
                title(strategy),
                " and ".join(_bytes(results, cell) for cell in cells),
                "-" if loss is None else f"{loss:.4f}",
                *(
                    f"{nbytes / MIB:.0f}"
                    for nbytes in (first.peak_bytes, first.model_state_bytes, first.communication_bytes)
                ),
            ]
        )
    return _table(heads, rows)


def title(strategy: Strategy) -> str:
    return f"**{strategy.title}**" if strategy.name == DEFAULT else strategy.title


def _times(results: Results, strategy: Strategy, count: int) -> tuple[str, str, str]:
    cell = results.cell(strategy.name, count)
    if cell is None or not cell.step_ms:
        return "-", "-", "-"
    spread_ms = cell.spread * cell.median_ms
    speedup = results.speedup(cell)
    return (
        f"{cell.median_ms:,.0f} ± {spread_ms:.0f}",
        "-" if speedup is None else f"{speedup:.2f}x",
        f"{cell.median_ms / results.limit_ms(cell):.2f}",
    )


def _bytes(results: Results, cell: Cell | None) -> str:
    return "-" if cell is None else f"{cell.sent_bytes / results.parameters:.2f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head, *lines = ("| " + " | ".join(row) + " |" for row in (heads, *rows))
    return [head.replace("|  |", "| |"), "|---" * len(heads) + "|", *lines]


if __name__ == "__main__":
    main()
