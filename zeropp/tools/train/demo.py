"""The demonstration: one GPT trained twice with the same data and seed, with plain FSDP2 and with zeropp.

It has two nodes of two ranks: network namespaces (a lab) if the machine allows them, else local ranks.

[Note: Link of the demonstration]
The speedup depends on the share of a step that waits for the network. At a fixed rate, a slow machine
computes for most of a step, and a fast machine waits for most of it. So `choose_link` measures plain FSDP2 on
links without a limit and sets the rate at which communication takes `WAITING_SHARE` of its step, as in the
ZeRO++ paper. gloo does not overlap plain FSDP2's communication with compute, so a step takes the time without
a limit plus the time on the link. The measurement is a short run before the two compared runs, which then
have the same link in all steps.
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
"""Name of the run that measures a step of plain FSDP2 on links without a limit."""
OPEN_STEPS = 12
RUNS: dict[str, Preset] = {"plain FSDP2": "fsdp2", "zeropp": "default"}
"""Names of the two compared runs and their presets."""
WAITING_SHARE = 0.7
"""Share of plain FSDP2's step that is communication; [Note: Link of the demonstration]."""
AUTO = "auto"
SIZE = (
    *("--model.layers", "2", "--model.width", "128", "--model.heads", "4", "--batch.sequence", "64"),
    *("--evaluation.every", "30"),
)
"""About 0.5M parameters, for four ranks on two cores. It is fixed, so losses of different machines
compare."""
PRECISION = ("--model.precision", "fp32")
"""FSDP2 sends weights in the precision of compute, which "auto" chooses by CPU. With fp32, the bytes in the
table are the same on every machine."""
START_SECONDS, OPEN_STEP_SECONDS = 10.0, 0.18
"""First estimates: the start of a job, and a step on links without a limit. They are roughly those of an
Intel Xeon with two cores; `TimeLeft` corrects them."""

MARK = ".zeropp-demo"
"""Name of a file that marks a folder as made by the demonstration, so that it may be deleted."""

Progress = Callable[[str, int], None]
"""A function that is called with the name of a run and the number of its completed steps."""


@dataclass(frozen=True)
class OpenStep:
    """A step of plain FSDP2 on links without a limit."""

    seconds: float
    node_bytes: float
    """Bytes that each node sends to the other."""

    @property
    def link(self) -> str:
        """Rate at which communication takes `WAITING_SHARE` of the step, within the rates of a lab.

        >>> OpenStep(seconds=0.3, node_bytes=10_000_000).link  # 80 Mbit in 0.7 seconds
        '114mbit'
        """
        line_seconds = self.seconds * WAITING_SHARE / (1 - WAITING_SHARE)
        rate_bit_s = round(8 * self.node_bytes / line_seconds)
        return format_rate(min(max(rate_bit_s, MIN_RATE_BIT_S), MAX_RATE_BIT_S))

    def explain(self) -> str:
        """Return a sentence with the chosen rate and its reason."""
        return (
            f"chose {self.link} links, on which plain FSDP2 waits for about {WAITING_SHARE:.0%} of its step: "
            f"on links without a limit, a step takes {self.seconds:.3f} seconds and each node sends "
            f"{size(self.node_bytes)}"
        )

    def waiting_share(self, run: Metrics) -> float:
        """Return the share of the run's median step that goes beyond a step without a limit on links."""
        return max(0.0, 1 - self.seconds / median_seconds(run))


@dataclass
class LabLauncher:
    """torchrun in the nodes of a lab."""

    cluster: Cluster

    @property
    def description(self) -> str:
        link = self.cluster.links[0].link
        return f"{NODES} nodes x {RANKS_PER_NODE} ranks in network namespaces, {link} links"

    def run(self, program: Sequence[str], each_second: Callable[[], None]) -> None:
        self.cluster.start(program).wait(each_second=each_second).check()


@dataclass
class LocalLauncher:
    """torchrun on this machine, with two ranks per simulated node."""

    why: str
    """Reason why there is no lab."""

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


Launcher = LabLauncher | LocalLauncher


@contextlib.contextmanager
def open_launcher(link: str) -> Iterator[Launcher]:
    """Open a lab, or fall back to local ranks. With the link "auto", the lab's links have no limit until
    `choose_link` sets one."""
    rate = UNLIMITED if link == AUTO else link
    try:
        parse_rate_bit_s(rate)
    except ValueError as error:
        raise ValueError(f"{error}, or {AUTO!r}") from None
    with contextlib.ExitStack() as stack:
        launcher: Launcher
        try:
            launcher = LabLauncher(stack.enter_context(Cluster(NODES, RANKS_PER_NODE, rate)))
        except LabError as error:
            launcher = LocalLauncher(str(error).split(";")[0])
        yield launcher


def choose_link(folder: Path, lab: LabLauncher, progress: Progress) -> OpenStep:
    """Measure a step of plain FSDP2 on the lab's links without a limit, and set the lab's rate from it."""
    _train(OPEN_LINKS, "fsdp2", OPEN_STEPS, folder, lab, progress)
    run = Metrics(folder / FILE_NAME)
    step = OpenStep(median_seconds(run), run.across_bytes_per_step / run.info.nodes)
    lab.cluster.set_link(link=step.link)
    return step


def run_demo(folders: Mapping[str, Path], steps: int, launcher: Launcher, progress: Progress) -> None:
    """Train with plain FSDP2 and then with zeropp, each in its folder."""
    for name, preset in RUNS.items():
        _train(name, preset, steps, folders[name], launcher, progress)


def expected_parts(steps: int, chooses_link: bool) -> dict[str, Part]:
    """Return the runs of a demonstration, in order, with the expected time of each."""
    plain_seconds = OPEN_STEP_SECONDS / (1 - WAITING_SHARE) if chooses_link else OPEN_STEP_SECONDS
    parts = {
        "plain FSDP2": Part(steps, START_SECONDS, plain_seconds),
        "zeropp": Part(steps, START_SECONDS, OPEN_STEP_SECONDS),
    }
    return (
        {OPEN_LINKS: Part(OPEN_STEPS, START_SECONDS, OPEN_STEP_SECONDS), **parts} if chooses_link else parts
    )


def median_seconds(run: Metrics) -> float:
    """Return the time of the run's median step."""
    return run.steps[-1].tokens / run.tokens_per_second


def make_folders(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Make an empty, marked folder for each run. Folders of an earlier demonstration are replaced."""
    folders = {name: folder / name.replace(" ", "-") for name in names}
    # All folders are checked before the first one is deleted: an error leaves everything in place.
    for run_folder in folders.values():
        _raise_unless_ours(run_folder)
    for run_folder in folders.values():
        shutil.rmtree(run_folder, ignore_errors=True)
        run_folder.mkdir(parents=True)
        (run_folder / MARK).touch()
    return folders


def _train(
    name: str, preset: Preset, steps: int, folder: Path, launcher: Launcher, progress: Progress
) -> None:
    program = ["-m", "zeropp", "train", "--folder", str(folder), "--preset", preset, *SIZE, *PRECISION]
    program += ["--steps", str(steps), "--resume", "never"]
    progress(name, 0)
    launcher.run(program, lambda: progress(name, steps_done(folder)))
    progress(name, steps)


def _raise_unless_ours(folder: Path) -> None:
    """Refuse to delete a folder that no demonstration has made. One of the names is zeropp: with `--folder .`
    in a clone, it is the package."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise ValueError(
            f"{folder} would be replaced, but no demonstration has made it; expected a --folder for the "
            "demonstration only, like runs/demo"
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a --folder for the demonstration only")


def steps_done(folder: Path) -> int:
    """Return the number of completed steps of a run. The run may still be writing."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / FILE_NAME).read_text().count('"kind": "step"')
    return 0
