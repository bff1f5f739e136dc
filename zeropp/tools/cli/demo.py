"""`zeropp demo`: what `make train` runs."""

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
from . import compare
from .options import read_options

SECONDS_BETWEEN_LINES = 10.0
"""How often progress is printed where there is no terminal."""


@dataclass
class Options:
    """Train a small GPT on the Python standard library's sources, with plain FSDP2 and with zeropp, on two
    nodes of two ranks each, and show both side by side. Takes two to three minutes on two busy cores."""

    folder: Path = Path("runs/demo")
    """For both runs and the report; an earlier demonstration in it is replaced."""
    steps: int = 60
    """Optimizer steps of each run."""
    link: str = demo.AUTO
    """Rate of each node's link, where the nodes are network namespaces: 300mbit, 1gbit, ..., or unlimited.
    "auto": the rate at which plain FSDP2 waits for the network during 70% of its step."""


def main(arguments: list[str]) -> int:
    options = read_options(Options, arguments, "demo")
    if options.steps < 1:
        raise ValueError(f"steps is {options.steps}; expected a positive number")
    cap_onednn()  # both runs, on any machine: tools/amx.py
    make_folder(options.folder)
    page = options.folder / "report.html"
    check_file(page)
    console, started = Console(highlight=False, soft_wrap=True), time.monotonic()
    with demo.open_launcher(options.link) as place:
        lab = place if isinstance(place, demo.LabLauncher) else None
        auto = lab if options.link == demo.AUTO else None
        parts = demo.expected_parts(options.steps, chooses_link=auto is not None)
        folders = demo.make_folders(options.folder, parts)
        open_step = None
        with show_progress(console, parts) as show:
            if auto is not None:
                open_step = demo.choose_link(folders.pop(demo.OPEN_LINKS), auto, show)
                console.print(open_step.explain(), markup=False)
            console.print(f"training on {place.description}", markup=False)
            demo.run_demo(folders, options.steps, place, show)
    runs = read_runs(list(folders.values()))
    plain, ours = runs.values()
    console.print(loss_curves(runs))
    compare.show(tuple(folders.values()), page, f"zeropp demo: {place.description}")
    for name, run in zip(folders, runs.values(), strict=True):
        console.print(f"checkpoint of {name}: {run.end.checkpoint if run.end else 'none'}", markup=False)
    if open_step is not None:
        share = open_step.waiting_share(plain)
        console.print(f"{place.description}: plain FSDP2 waited for {share:.0%} of its step", markup=False)
    console.print(f"took {time.monotonic() - started:.0f} seconds")
    console.print(result_sentence(plain, ours, has_network=lab is not None), markup=False)
    return 0


@contextmanager
def show_progress(console: Console, parts: Mapping[str, Part]) -> Iterator[demo.Progress]:
    """One bar for all runs, with the time left; lines now and then where there is no terminal."""
    left = TimeLeft(parts)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]} left"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=left.total, left=minutes(left.seconds))
        last_line = (0.0, "")  # when, and of which run

        def show(name: str, steps: int) -> None:
            nonlocal last_line
            left.update(name, steps)
            text, time_left = f"{name}, step {steps}/{parts[name].steps}", minutes(left.seconds)
            bar.update(task, completed=left.done, description=text, left=time_left)
            now, (printed, of) = time.monotonic(), last_line
            if not console.is_terminal and (name != of or now > printed + SECONDS_BETWEEN_LINES):
                last_line = (now, name)
                console.print(f"{text}, {time_left} left", markup=False)

        yield show
