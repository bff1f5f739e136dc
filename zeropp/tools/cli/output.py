"""Output that several commands share: the console of tables, and the comparison of training runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from ..atomic_files import check_file, write_file
from ..report.compare import compare_table, differences, read_runs
from ..report.compare_page import render_compare

FILE_WIDTH = 170
"""Width of tables that go to a file, in characters."""


def table_console() -> Console:
    """Return a console for tables: as wide as the terminal, or `FILE_WIDTH` if there is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=FILE_WIDTH)


def check_files(*paths: Path | None) -> None:
    """Raise a ValueError if one of the given files cannot be written."""
    for path in paths:
        if path is not None:
            check_file(path)


def print_sentences(console: Console, sentences: Iterable[str]) -> None:
    for sentence in sentences:
        console.print(f"- {sentence}", markup=False)


def show_comparison(paths: Iterable[Path], html: Path, title: str = "zeropp compare") -> None:
    """Print a table of training runs, and write the page with their plots."""
    check_file(html)
    runs = read_runs(list(paths))
    write_file(html, render_compare(runs, title))
    console = table_console()
    console.print(compare_table(runs))
    print_sentences(console, differences(runs))
    console.print(f"report: {html}", markup=False)
