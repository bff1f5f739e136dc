"""`zeropp demo`: what `make train` runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..amx import cap_onednn
from ..output_files import check_file, make_folder
from ..report.compare import loss_curves, read_runs
from ..train.demo import RUNS, find_place, run_demo
from . import compare
from .options import read_options


@dataclass
class Options:
    """Train a small GPT on the Python standard library's sources, with plain FSDP2 and with zeropp, on two
    nodes of two ranks each, and show both side by side. Takes about three minutes on two cores."""

    folder: Path = Path("runs/demo")
    """For both runs and the report; an earlier demonstration in it is replaced."""
    steps: int = 250
    """Optimizer steps of each run."""
    link: str = "1gbit"
    """Rate of each node's link, where the nodes are network namespaces."""


def main(arguments: list[str]) -> int:
    options = read_options(Options, arguments, "demo")
    if options.steps < 1:
        raise ValueError(f"steps is {options.steps}; expected a positive number")
    cap_onednn()  # both runs, on any machine: amx.py
    make_folder(options.folder)
    page = options.folder / "report.html"
    check_file(page)
    console, started = Console(highlight=False, soft_wrap=True), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("left"))
    with (
        find_place(options.link) as place,
        Progress(*columns, TimeRemainingColumn(), console=console, speed_estimate_period=300) as progress,
    ):
        console.print(f"training on {place.description}", markup=False)
        tasks = {name: progress.add_task(name, total=options.steps, start=False) for name in RUNS}

        def show(name: str, steps: int) -> None:
            if steps and not progress.tasks[tasks[name]].started:
                progress.start_task(tasks[name])
            progress.update(tasks[name], completed=steps)

        folders = run_demo(options.folder, options.steps, place, show)
    runs = read_runs(list(folders.values()))
    console.print(loss_curves(runs))
    compare.show(tuple(folders.values()), page, "zeropp demo")
    for name, run in zip(RUNS, runs.values(), strict=True):
        console.print(f"checkpoint of {name}: {run.end.checkpoint if run.end else 'none'}", markup=False)
    console.print(f"took {time.monotonic() - started:.0f} seconds")
    return 0
