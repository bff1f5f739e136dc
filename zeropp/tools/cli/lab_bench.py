"""`zeropp lab bench`: step time, bytes, memory and loss of every strategy, on a shaped cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..atomic_files import check_file, write_file
from ..bench.results import Results, verdicts
from ..bench.run import BenchSettings, run_bench
from ..report import bench_tables, render_bench
from ..report.bench_tables import EXPLANATION
from .options import read_options

FILE_WIDTH = 170  # of tables that go to a file


@dataclass
class Options:
    """Train the same model in every way a user could pick, and measure each, in one interleaved run.

    Builds a cluster of network namespaces, finds the link rate of the regime, and takes minutes."""

    settings: Annotated[BenchSettings, tyro.conf.arg(name="")]
    json: Path = Path("bench.json")
    """Where the numbers go; also those of a run that is interrupted."""
    html: Path = Path("bench.html")
    """Where the report goes."""
    show: Path | None = None
    """Do not measure: show the JSON file of an earlier run, and write its report."""


def main(arguments: list[str]) -> int:
    options = read_options(Options, arguments, "lab bench")
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=FILE_WIDTH)
    check_file(options.html)
    if options.show is not None:
        results = Results.load(options.show)
    else:
        check_file(options.json)
        results = _run(options.settings, console, options.json)
    write_file(options.html, render_bench(results))
    for table in bench_tables(results):
        console.print(table)
    console.print(EXPLANATION, style="dim")
    for sentence in verdicts(results):
        console.print(f"- {sentence}", markup=False)
    console.print(f"report: {options.html}" + ("" if options.show else f"; numbers: {options.json}"))
    return 0


def _run(settings: BenchSettings, console: Console, path: Path) -> Results:
    """Run, and save what there is now and then: `--show` works on an interrupted run, too."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"))
    with Progress(*columns, TimeRemainingColumn(), console=console, speed_estimate_period=600) as progress:
        task = progress.add_task("starting ranks", total=1.0)

        def show(what: str, done: float) -> None:
            progress.update(task, completed=done)
            if what:
                progress.update(task, description=what)

        return run_bench(settings, show, on_results=lambda results: results.save(path))
