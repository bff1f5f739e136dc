"""`zeropp compare`: training runs side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from ..atomic_files import check_file, write_file
from ..report.compare import compare_table, differences, read_runs
from ..report.compare_page import render_compare
from .options import read_options

FILE_WIDTH = 170  # of tables that go to a file


@dataclass
class Options:
    """Show losses and bytes of training runs side by side, and write a page with plots.

    zeropp compare runs/plain runs/zeropp
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, or their metrics.jsonl; the first is what the others are compared to."""
    html: Path = Path("compare.html")
    """Where the page goes."""


def main(arguments: list[str]) -> int:
    options = read_options(Options, arguments, "compare")
    if not options.runs:
        raise ValueError(
            "there is no run to compare; expected folders or metrics.jsonl files of zeropp train"
        )
    show(options.runs, options.html)
    return 0


def show(paths: tuple[Path, ...], html: Path, title: str = "zeropp compare") -> None:
    """Print the table and write the page."""
    check_file(html)
    runs = read_runs(list(paths))
    write_file(html, render_compare(runs, title))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=FILE_WIDTH)
    console.print(compare_table(runs))
    for sentence in differences(runs):
        console.print(f"- {sentence}", markup=False)
    console.print(f"report: {html}", markup=False)
