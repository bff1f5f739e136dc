"""`zeropp doctor`: check that zeropp is correct on this cluster, and measure whether it is faster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ..atomic_files import write_file
from ..doctor.check import PARTS, DoctorSettings, Part
from ..doctor.run import Diagnosis, diagnose
from ..report.doctor import EXPLANATION, doctor_tables, render_doctor, verdict
from ..train.world import join_world
from .options import read_options
from .output import check_files, print_sentences, table_console


@dataclass(frozen=True)
class Options:
    """Check zeropp on this cluster: kernels, collectives and training, then measure speed, in two minutes.

    Start it with torchrun on all nodes, like a training run. A single process skips the checks that need
    several ranks. The exit code is 1 if a check finds a fault.

        torchrun --nnodes 2 --nproc-per-node 8 ... -m zeropp doctor
        zeropp plan --model 18B --nodes 24 --hardware hardware.json
    """

    settings: Annotated[DoctorSettings, tyro.conf.arg(name="")] = field(default_factory=DoctorSettings)
    parts: tuple[Part, ...] = PARTS
    """Parts to run."""
    timeout_seconds: float = 60.0
    """Time limit for a rank that waits for another."""
    hardware: Path = Path("hardware.json")
    """File for the measured hardware, an input of `zeropp plan --hardware`."""
    json: Path | None = None
    """File for all results and numbers."""
    html: Path | None = None
    """File for the report."""


def main(arguments: list[str]) -> int:
    options = read_options(Options, arguments, "doctor")
    if os.environ.get("RANK", "0") == "0":  # rank 0 writes; other nodes may not have these folders
        check_files(options.hardware, options.json, options.html)
    console = table_console()
    with (
        join_world(options.timeout_seconds) as world,
        _without_warnings(),
        _progress(console, world.is_first) as on_progress,
    ):
        diagnosis = diagnose(options.settings, options.parts, options.timeout_seconds, on_progress)
    if world.is_first:
        _show(diagnosis, options, console)
    return 0 if diagnosis.is_healthy else 1


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide the warning about zeropp's state, which is larger than the shards of so small a model."""
    logger = logging.getLogger("zeropp")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _progress(console: Console, is_first: bool) -> Iterator[Callable[[str, str], None]]:
    """Show progress on the first rank: a status line, or a line per part if there is no terminal."""
    if not is_first:
        yield lambda part, name: None
    elif console.is_terminal:
        with console.status("starting") as status:
            yield lambda part, name: status.update(f"{part}: {name}")
    else:
        shown: set[str] = set()

        def show(part: str, name: str) -> None:
            if part not in shown:
                console.print(f"{part} ...")
            shown.add(part)

        yield show


def _show(diagnosis: Diagnosis, options: Options, console: Console) -> None:
    for table in doctor_tables(diagnosis):
        console.print(table)
    if diagnosis.steps:
        console.print(EXPLANATION, style="dim")
    print_sentences(console, (verdict(diagnosis), *diagnosis.advice))
    if diagnosis.hardware is not None:
        diagnosis.hardware.save(options.hardware)
        console.print(f"hardware for zeropp plan: {options.hardware}")
    if options.json is not None:
        diagnosis.save(options.json)
        console.print(f"numbers: {options.json}")
    if options.html is not None:
        write_file(options.html, render_doctor(diagnosis))
        console.print(f"report: {options.html}")
