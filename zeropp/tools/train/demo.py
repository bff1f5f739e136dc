"""The demonstration: one GPT trained twice in the same way, with plain FSDP2 and with zeropp.

Two nodes of two ranks: a lab of network namespaces where the machine allows it; else local ranks play them.

[Note: Link of the demonstration]
The speedup depends on the share of a step that waits for the network. At a fixed rate, a slow machine
computes for most of a step, and a fast one waits for most of it. So `choose_link` measures plain FSDP2 on
open links and sets the rate at which communication takes `SHARE` of its step, the regime of the ZeRO++ paper.
gloo does not overlap plain FSDP2's communication with compute: a step takes the open step plus the time on
the line. The measurement is a short run before the others, so both compared runs have one link for all their
steps.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ..._text import size
from ..lab import Cluster, LabError
from ..lab.job import Job, rank_environment, torchrun
from ..lab.link_properties import MAX_RATE_BIT_S, MIN_RATE_BIT_S, UNLIMITED, format_rate, parse_rate_bit_s
from .config import Preset
from .metrics import FILE_NAME, Metrics
from .time_left import Part

NODES, RANKS_PER_NODE = 2, 2
OPEN_LINKS = "open links"
"""The name of the run that measures a step of plain FSDP2 without a limit on links."""
OPEN_STEPS = 12
RUNS: dict[str, Preset] = {"plain FSDP2": "fsdp2", "zeropp": "default"}
"""Names of the two runs, and what they send."""
SHARE = 0.7
"""Share of plain FSDP2's step that is communication; [Note: Link of the demonstration]."""
AUTO = "auto"
SIZE = (
    *("--model.layers", "2", "--model.width", "128", "--model.heads", "4", "--batch.sequence", "64"),
    *("--evaluation.every", "30"),
)
"""About 0.5M parameters, for two cores that four ranks share; the same on all machines, to compare losses."""
PRECISION = ("--model.precision", "fp32")
"""Some CPUs compute in bf16, and FSDP2 sends what it computes with: the table must say the same on all."""
START_SECONDS, OPEN_STEP_SECONDS = 10.0, 0.18
"""First guess of the time left: a job without its steps, and a step on open links. Roughly those of an Intel
Xeon with two cores; `TimeLeft` corrects them."""

MARK = ".zeropp-demo"
"""A file in each folder that a demonstration has made."""

Progress = Callable[[str, int], None]
"""Called with the name of a run and the number of its steps that are done."""


@dataclass(frozen=True)
class OpenStep:
    """A step of plain FSDP2 on links without a limit."""

    seconds: float
    node_bytes: float
    """Sent by each node."""

    @property
    def link(self) -> str:
        """The rate at which communication takes `SHARE` of the step, within the rates of a lab.

        >>> OpenStep(seconds=0.3, node_bytes=10_000_000).link  # 80 Mbit in 0.7 seconds
        '114mbit'
        """
        line_seconds = self.seconds * SHARE / (1 - SHARE)
        rate_bit_s = round(8 * self.node_bytes / line_seconds)
        return format_rate(min(max(rate_bit_s, MIN_RATE_BIT_S), MAX_RATE_BIT_S))

    def explain(self) -> str:
        """Which link, and why."""
        return (
            f"chose {self.link} links, on which plain FSDP2 waits for about {SHARE:.0%} of its step: on open "
            f"links, a step takes {self.seconds:.3f} seconds and sends {size(self.node_bytes)} from each node"
        )

    def waiting_share(self, run: Metrics) -> float:
        """Share of the run's median step that the open step does not have."""
        return max(0.0, 1 - self.seconds / median_seconds(run))


@dataclass
class Lab:
    cluster: Cluster

    @property
    def description(self) -> str:
        link = self.cluster.links[0].link
        return f"{NODES} nodes x {RANKS_PER_NODE} ranks in network namespaces, {link} links"

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


Place = Lab | LocalRanks


@contextlib.contextmanager
def find_place(link: str) -> Iterator[Place]:
    """A lab, or else local ranks. With the link "auto", the lab's links are open until `choose_link`."""
    rate = UNLIMITED if link == AUTO else link
    try:
        parse_rate_bit_s(rate)
    except ValueError as error:
        raise ValueError(f"{error}, or {AUTO!r}") from None
    with contextlib.ExitStack() as stack:
        place: Place
        try:
            place = Lab(stack.enter_context(Cluster(NODES, RANKS_PER_NODE, rate)))
        except LabError as error:
            place = LocalRanks(str(error).split(";")[0])
        yield place


def choose_link(folder: Path, lab: Lab, progress: Progress) -> OpenStep:
    """Measure a step of plain FSDP2 on the lab's open links, and give the lab the link of that step."""
    _train(OPEN_LINKS, "fsdp2", OPEN_STEPS, folder, lab, progress)
    run = Metrics(folder / FILE_NAME)
    step = OpenStep(median_seconds(run), run.across_bytes_per_step / run.info.nodes)
    lab.cluster.set_link(link=step.link)
    return step


def run_demo(folders: Mapping[str, Path], steps: int, place: Place, progress: Progress) -> None:
    """Train with plain FSDP2, then with zeropp, each into its folder."""
    for name, preset in RUNS.items():
        _train(name, preset, steps, folders[name], place, progress)


def expected_parts(steps: int, chooses_link: bool) -> dict[str, Part]:
    """The runs of a demonstration, in their order, and the time that each is expected to take."""
    plain_seconds = OPEN_STEP_SECONDS / (1 - SHARE) if chooses_link else OPEN_STEP_SECONDS
    parts = {
        "plain FSDP2": Part(steps, START_SECONDS, plain_seconds),
        "zeropp": Part(steps, START_SECONDS, OPEN_STEP_SECONDS),
    }
    return (
        {OPEN_LINKS: Part(OPEN_STEPS, START_SECONDS, OPEN_STEP_SECONDS), **parts} if chooses_link else parts
    )


def median_seconds(run: Metrics) -> float:
    """The time of the run's median step."""
    return run.steps[-1].tokens / run.tokens_per_second


def make_folders(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """An empty folder for each run, with a mark. Earlier ones are replaced: all of them, or none."""
    folders = {name: folder / name.replace(" ", "-") for name in names}
    for run_folder in folders.values():
        _raise_unless_ours(run_folder)
    for run_folder in folders.values():
        shutil.rmtree(run_folder, ignore_errors=True)
        run_folder.mkdir(parents=True)
        (run_folder / MARK).touch()
    return folders


def _train(name: str, preset: Preset, steps: int, folder: Path, place: Place, progress: Progress) -> None:
    program = ["-m", "zeropp", "train", "--folder", str(folder), "--preset", preset, *SIZE, *PRECISION]
    program += ["--steps", str(steps), "--resume", "never"]
    progress(name, 0)
    place.run(program, lambda: progress(name, steps_done(folder)))
    progress(name, steps)


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
