"""`zeropp lab bench`: measure step time, bytes, memory and loss of every strategy, with shaped links."""

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
from .output import print_sentences, table_console


@dataclass
class Options:
    """Train one model with every strategy, in one interleaved run, and measure each.

    This creates a cluster of network namespaces, finds the link rate of the regime, and takes minutes."""

    settings: Annotated[BenchSettings, tyro.conf.arg(name="")]
    json: Path = Path("bench.json")
    """File for the numbers. An interrupted run writes its numbers too."""
    html: Path = Path("bench.html")
    """File for the report."""
    show: Path | None = None
    """JSON file of an earlier run. Its report is written, and nothing is measured."""


def main(arguments: list[str]) -> int:
    options = read_options(Options, arguments, "lab bench")
    console = table_console()
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
    print_sentences(console, verdicts(results))
    console.print(f"report: {options.html}" + ("" if options.show else f"; numbers: {options.json}"))
    return 0


def _run(settings: BenchSettings, console: Console, path: Path) -> Results:
    """Run the benchmark. It saves the results so far, so that `--show` works after an interruption."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"))
    with Progress(*columns, TimeRemainingColumn(), console=console, speed_estimate_period=600) as progress:
        task = progress.add_task("starting ranks", total=1.0)

        def show(description: str, done: float) -> None:
            progress.update(task, completed=done)
            if description:
                progress.update(task, description=description)

        return run_bench(settings, show, on_results=lambda results: results.save(path))
