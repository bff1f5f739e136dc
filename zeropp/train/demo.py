"""The demonstration: one GPT trained twice in the same way, with plain FSDP2 and with zeropp.

Two nodes of two ranks: a lab of network namespaces where the machine allows it; else local ranks play them.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from ..lab import Cluster, LabError
from ..lab.job import Job, rank_environment, torchrun
from .config import Preset
from .metrics import FILE_NAME

NODES, RANKS_PER_NODE = 2, 2
RUNS: dict[str, Preset] = {"plain FSDP2": "fsdp2", "zeropp": "default"}
"""Names of the two runs, and what they send."""
SIZE = ("--model.layers", "3", "--model.width", "128", "--model.heads", "4", "--batch.sequence", "64")
"""About 0.7M parameters, for two cores that four ranks share."""
PRECISION = ("--model.precision", "fp32")
"""Some CPUs compute in bf16, and FSDP2 sends what it computes with: the table must say the same on all."""

MARK = ".zeropp-demo"
"""A file in each folder that a demonstration has made."""

Progress = Callable[[str, int], None]
"""Told the name of a run and how many steps it has done."""


class Place(Protocol):
    """Somewhere to run a torchrun program on two nodes of two ranks."""

    @property
    def description(self) -> str: ...

    def run(self, program: Sequence[str], each_second: Callable[[], None]) -> None: ...


@dataclass
class Lab:
    cluster: Cluster
    link: str

    @property
    def description(self) -> str:
        return f"{NODES} nodes x {RANKS_PER_NODE} ranks in network namespaces, {self.link} links"

    def run(self, program: Sequence[str], each_second: Callable[[], None]) -> None:
        self.cluster.start(program).wait(each_second=each_second).check()


@dataclass
class LocalRanks:
    """torchrun on this machine; zeropp is told that two ranks make a node."""

    why: str
    """There is no lab."""

    @property
    def description(self) -> str:
        return f"{NODES * RANKS_PER_NODE} local ranks that play {NODES} nodes (no lab here: {self.why})"

    def run(self, program: Sequence[str], each_second: Callable[[], None]) -> None:
        ranks = NODES * RANKS_PER_NODE
        with TemporaryDirectory() as name:
            folder = Path(name)
            program = [*program, "--zeropp.node-size", str(RANKS_PER_NODE)]
            command = torchrun(("--standalone",), ranks, folder, "logs", program)
            Job([command], ranks, rank_environment({}), folder).wait(each_second=each_second).check()


@contextlib.contextmanager
def find_place(link: str) -> Iterator[Place]:
    """A lab, or else local ranks."""
    with contextlib.ExitStack() as stack:
        place: Place
        try:
            place = Lab(stack.enter_context(Cluster(NODES, RANKS_PER_NODE, link)), link)
        except LabError as error:
            place = LocalRanks(str(error).split(";")[0])
        yield place


def run_demo(folder: Path, steps: int, place: Place, progress: Progress) -> dict[str, Path]:
    """Train both, anew; returns the folder of each."""
    folders = {name: folder / name.replace(" ", "-") for name in RUNS}
    replace_folders(folders.values())
    for name, run_folder in folders.items():
        program = [
            "-m",
            "zeropp",
            "train",
            "--folder",
            str(run_folder),
            "--preset",
            RUNS[name],
            *SIZE,
            *PRECISION,
        ]
        program += ["--steps", str(steps), "--resume", "never"]
        place.run(program, lambda name=name, path=run_folder: progress(name, steps_done(path)))  # type: ignore[misc]
        progress(name, steps)
    return folders


def replace_folders(folders: Collection[Path]) -> None:
    """Make them anew and empty, but for a mark; all of them, or none."""
    for folder in folders:
        _raise_unless_ours(folder)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / MARK).touch()


def _raise_unless_ours(folder: Path) -> None:
    """Nothing is deleted that no demonstration has made: `--folder .` in a clone has the package in it."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise ValueError(
            f"{folder} is not of an earlier demonstration, and would be replaced; expected a --folder for "
            "the demonstration alone, like runs/demo"
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a --folder for the demonstration alone")


def steps_done(folder: Path) -> int:
    """How far a run is that is going on."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / FILE_NAME).read_text().count('"kind": "step"')
    return 0
