"""`zeropp doctor`: whether zeropp is right on this cluster, and whether it helps."""

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

from ..atomic_files import check_file, write_file
from ..doctor.check import PARTS, Part, Settings
from ..doctor.run import Diagnosis, make_visit
from ..report.doctor import EXPLANATION, doctor_tables, render_doctor, verdict
from ..train.world import join_world
from .lab_bench import FILE_WIDTH
from .options import read_options


@dataclass(frozen=True)
class Options:
    """Prove zeropp on the cluster at hand: kernels, collectives, training, and then speed, in two minutes.

    Start it with torchrun on all nodes, as a training run; alone, it says what it could not check. The exit
    code is 1 if anything is wrong.

        torchrun --nnodes 2 --nproc-per-node 8 ... -m zeropp doctor
        zeropp plan --model 18B --nodes 24 --hardware hardware.json
    """

    settings: Annotated[Settings, tyro.conf.arg(name="")] = field(default_factory=Settings)
    parts: tuple[Part, ...] = PARTS
    """What to look at."""
    timeout_seconds: float = 60.0
    """After which a rank that waits for another gives up."""
    hardware: Path = Path("hardware.json")
    """Where the measured hardware goes, for `zeropp plan --hardware`."""
    json: Path | None = None
    """Where all findings and numbers go."""
    html: Path | None = None
    """Where the report goes."""


def main(arguments: list[str]) -> int:
    options = read_options(Options, arguments, "doctor")
    if os.environ.get("RANK", "0") == "0":  # who writes; other nodes need not have these folders
        for path in (options.hardware, options.json, options.html):
            if path is not None:
                check_file(path)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=FILE_WIDTH)
    with (
        join_world(options.timeout_seconds) as world,
        _without_warnings(),
        _progress(console, world.is_first) as on_progress,
    ):
        diagnosis = make_visit(options.settings, options.parts, options.timeout_seconds, on_progress)
    if world.is_first:
        _show(diagnosis, options, console)
    return 0 if diagnosis.is_healthy else 1


@contextmanager
def _without_warnings() -> Iterator[None]:
    """The smallest of models keep more than their shards, on every preset: nobody needs to know."""
    logger = logging.getLogger("zeropp")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _progress(console: Console, is_first: bool) -> Iterator[Callable[[str, str], None]]:
    """The first rank says what runs: in one line that changes, or, in a file, once for each part."""
    if not is_first:
        yield lambda part, name: None
    elif console.is_terminal:
        with console.status("starting") as status:
            yield lambda part, name: status.update(f"{part}: {name}")
    else:
        said: set[str] = set()

        def say(part: str, name: str) -> None:
            if part not in said:
                console.print(f"{part} ...")
            said.add(part)

        yield say


def _show(diagnosis: Diagnosis, options: Options, console: Console) -> None:
    for table in doctor_tables(diagnosis):
        console.print(table)
    if diagnosis.steps:
        console.print(EXPLANATION, style="dim")
    for sentence in (verdict(diagnosis), *diagnosis.advice):
        console.print(f"- {sentence}", markup=False)
    if diagnosis.hardware is not None:
        diagnosis.hardware.save(options.hardware)
        console.print(f"hardware, for zeropp plan: {options.hardware}")
    if options.json is not None:
        diagnosis.save(options.json)
        console.print(f"numbers: {options.json}")
    if options.html is not None:
        write_file(options.html, render_doctor(diagnosis))
        console.print(f"report: {options.html}")
