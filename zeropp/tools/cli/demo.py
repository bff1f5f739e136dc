"""`zeropp demo`, which `make train` runs: two short training runs, and their comparison."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ..amx import cap_onednn
from ..atomic_files import check_file, make_folder
from ..report.compare import loss_curves, read_runs, result_sentence
from ..train import demo
from ..train.time_left import Part, TimeLeft, minutes
from .options import read_options
from .output import show_comparison

SECONDS_BETWEEN_LINES = 10.0
"""Interval of progress lines if there is no terminal."""


@dataclass
class Options:
    """Train a small GPT on the source code of the Python standard library, with plain FSDP2 and with zeropp,
    on two nodes of two ranks each, and compare the runs. This takes two to three minutes on two busy
    cores."""

    folder: Path = Path("runs/demo")
    """Folder of both runs and the report. An earlier demonstration in it is replaced."""
    steps: int = 60
    """Optimizer steps of each run."""
    link: str = demo.AUTO
    """Rate of each node's link, if the nodes are network namespaces: 300mbit, 1gbit, ..., or unlimited.
    "auto": the rate at which plain FSDP2 waits for the network during 70% of its step."""


def main(arguments: list[str]) -> int:
    options = read_options(Options, arguments, "demo")
    if options.steps < 1:
        raise ValueError(f"steps is {options.steps}; expected a positive number")
    cap_onednn()  # for both runs, on any machine: see tools/amx.py
    make_folder(options.folder)
    page = options.folder / "report.html"
    check_file(page)
    console, started = Console(highlight=False, soft_wrap=True), time.monotonic()
    with demo.open_launcher(options.link) as launcher:
        lab = launcher if isinstance(launcher, demo.LabLauncher) else None
        auto = lab if options.link == demo.AUTO else None
        parts = demo.expected_parts(options.steps, chooses_link=auto is not None)
        folders = demo.make_folders(options.folder, parts)
        open_step = None
        with show_progress(console, parts) as show:
            if auto is not None:
                open_step = demo.choose_link(folders.pop(demo.OPEN_LINKS), auto, show)
                console.print(open_step.explain(), markup=False)
            console.print(f"training on {launcher.description}", markup=False)
            demo.run_demo(folders, options.steps, launcher, show)
    runs = read_runs(list(folders.values()))
    plain, ours = runs.values()
    console.print(loss_curves(runs))
    show_comparison(folders.values(), page, f"zeropp demo: {launcher.description}")
    for name, run in zip(folders, runs.values(), strict=True):
        console.print(f"checkpoint of {name}: {run.end.checkpoint if run.end else 'none'}", markup=False)
    if open_step is not None:
        share = open_step.waiting_share(plain)
        console.print(f"{launcher.description}: plain FSDP2 waited for {share:.0%} of its step", markup=False)
    console.print(f"took {time.monotonic() - started:.0f} seconds")
    console.print(result_sentence(plain, ours, has_network=lab is not None), markup=False)
    return 0


@contextmanager
def show_progress(console: Console, parts: Mapping[str, Part]) -> Iterator[demo.Progress]:
    """Show one progress bar for all runs, with the time left, or print lines if there is no terminal."""
    left = TimeLeft(parts)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]} left"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=left.total, left=minutes(left.seconds))
        last_line = (0.0, "")  # its time, and the name of its run

        def show(name: str, steps: int) -> None:
            nonlocal last_line
            left.update(name, steps)
            text, time_left = f"{name}, step {steps}/{parts[name].steps}", minutes(left.seconds)
            bar.update(task, completed=left.done, description=text, left=time_left)
            now, (last_time, last_name) = time.monotonic(), last_line
            is_due = name != last_name or now > last_time + SECONDS_BETWEEN_LINES
            if is_due and not console.is_terminal:
                last_line = (now, name)
                console.print(f"{text}, {time_left} left", markup=False)

        yield show
