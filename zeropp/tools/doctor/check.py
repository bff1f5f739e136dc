"""Checks, their results, and the agreement of all ranks on one result.

[Note: Agreement]
All ranks run the same checks in the same order. After each check, they exchange their results in a separate
gloo group. Every decision depends only on these results, so all ranks take the same branch.

If a check raises on one rank, other ranks may wait for it in a collective. They give up after the timeout of
the job's process groups. Then all ranks meet in the agreement, whose timeout is longer. Afterwards the job's
groups may be out of step, so checks that communicate are skipped, and their results say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ... import Config
from ...process_groups import world
from ...topology import Topology
from ..bench.workload import HEAD_WIDTH
from ..plan.hardware import Hardware
from ..strategies import PRESETS, preset_code
from ..train.world import World

State = Literal["ok", "not run", "warning", "fault"]
STATES: tuple[State, ...] = ("ok", "not run", "warning", "fault")
"""All states, from best to worst."""
Part = Literal["surroundings", "kernels", "collectives", "training", "speed"]
PARTS: tuple[Part, ...] = ("surroundings", "kernels", "collectives", "training", "speed")
AGREEMENT_TIMEOUTS = 4
"""Timeout of an agreement, in timeouts of the job, since several collectives of a check may time out."""
MESSAGE_LENGTH = 300
"""Characters of an error message that are shown."""
MISSING_RANK_ADVICE = "read the output of the missing rank; if the rank hangs: py-spy dump"


@dataclass(frozen=True)
class CheckResult:
    """The observation of a check, with advice: of one rank, or of all ranks."""

    state: State
    saw: str
    advice: str = ""


@dataclass(frozen=True)
class DoctorSettings:
    """Options of the checks."""

    node_size: int | None = None
    """Ranks per node, in order of rank, as in Config.node_size; default: detected, as in training."""
    model: str | None = None
    """Model of the speed part: "tiny", "125M", "350M", "1.3B", "18B", or "hf:" and a local path; default:
    tiny on a CPU, on other devices the largest of 1.3B, 350M and 125M that fits."""
    micro_batch: int = 4
    """Sequences per rank and micro-batch of the speed part."""
    micro_batches: int = 1
    """Micro-batches per step of the speed part."""
    sequence: int = 128
    """Tokens per sequence of the speed part."""
    width: int | None = None
    """Width of the layers on which the speed part measures compute, a multiple of 64: best the width of your
    model; default: 512 on a CPU, 4096 elsewhere."""
    rounds: int = 3
    """Turns of each strategy in the speed part."""

    def __post_init__(self) -> None:
        if self.width is not None and (self.width < 1 or self.width % HEAD_WIDTH):
            raise ValueError(f"width is {self.width!r}; expected a multiple of {HEAD_WIDTH}")
        for name in ("node_size", "micro_batch", "micro_batches", "sequence", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value!r}; expected a positive number")

    def presets(self) -> dict[str, Config]:
        """Return every preset, by its Python code."""
        return {
            preset_code(name): preset(node_size=self.node_size or "auto") for name, preset in PRESETS.items()
        }


@dataclass(frozen=True)
class StepTime:
    """The step time of one strategy."""

    name: str
    milliseconds: float
    speedup: float
    """Throughput, relative to plain FSDP2."""
    across_bytes: float | None
    """Bytes that a node sends to others in a step; None: not counted."""
    hidden: float | None
    """Fraction of the communication that is hidden behind compute; None: unknown."""


@dataclass(eq=False)  # hashable by identity, for `lru_cache`
class Session:
    """State that all checks share."""

    settings: DoctorSettings
    world: World
    agreement: ProcessGroup
    """Group of the agreements: see [Note: Agreement]."""
    timeout: timedelta
    """Timeout of the job's process groups."""
    hardware: Hardware | None = None
    """Hardware that the speed part has measured."""
    steps: list[StepTime] = field(default_factory=list)
    """Step times that the speed part has measured, one for each strategy."""
    advice: list[str] = field(default_factory=list)
    """Advice about speed, in sentences."""

    @classmethod
    def begin(cls, settings: DoctorSettings, timeout_seconds: float) -> Session:
        """Begin a session on all ranks of an initialized process group with the timeout `timeout_seconds`."""
        timeout = timedelta(seconds=timeout_seconds)
        agreement = dist.new_group(backend="gloo", timeout=AGREEMENT_TIMEOUTS * timeout)
        return cls(settings, World.current(), agreement, timeout)

    @cached_property
    def topology(self) -> Topology:
        """Topology of the cluster. Its first use is a collective, which all ranks reach in the same check."""
        return Topology.of(world(), self.settings.node_size or "auto")

    @property
    def is_alone(self) -> bool:
        return self.world.size == 1

    def exchange(self, mine: Any) -> list[Any]:
        """Return the value of every rank. Raise if a rank does not arrive; on rank 0 the error names it."""
        dist.monitored_barrier(self.agreement, AGREEMENT_TIMEOUTS * self.timeout, wait_all_ranks=True)
        everyone: list[Any] = [None] * self.world.size
        dist.all_gather_object(everyone, mine, group=self.agreement)
        return everyone


@dataclass(frozen=True)
class Check:
    """One check of a part."""

    part: Part
    name: str
    does: str
    """Description for users."""
    run: Callable[[Session], Any]
    """Function that every rank calls. It returns a CheckResult, or an input of `judge`."""
    judge: Callable[[Sequence[Any]], CheckResult] | None = None
    """Function that combines the values of all ranks; default: `merge_results`."""
    communicates: bool = True
    """Whether ranks wait for each other in the check."""
    needs_ranks: bool = True
    """Whether the check needs more than one rank."""


@dataclass(frozen=True)
class CheckReport:
    """A check with its result on all ranks: a line of the report."""

    part: Part
    name: str
    does: str
    state: State
    saw: str
    advice: str
    seconds: float


@dataclass(frozen=True)
class Raised:
    """The error of a check on this rank, with the seconds from the start of the check."""

    seconds: float
    error: str


def run_checks(
    checks: Iterable[Check],
    session: Session,
    on_progress: Callable[[str, str], None] = lambda part, name: None,
) -> list[CheckReport]:
    """Run all checks, on all ranks together. The reports are the same on every rank."""
    reports: list[CheckReport] = []
    out_of_step: str | None = None
    for check in checks:
        on_progress(check.part, check.name)
        started = time.monotonic()
        is_missing_rank = False
        if session.is_alone and check.needs_ranks:
            result = CheckResult("not run", "there is one rank", "start it with torchrun on all nodes")
        elif out_of_step is not None and check.communicates:
            result = CheckResult("not run", f"{out_of_step} left ranks out of step", "fix that first")
        else:
            try:
                by_rank = session.exchange(_run(check, session))
            except RuntimeError as error:  # a rank has ended or hangs, so later agreements would fail, too
                message = f"not all ranks arrived after the check: {_one_line(error)}"
                result, is_missing_rank = CheckResult("fault", message, MISSING_RANK_ADVICE), True
            else:
                raised = {rank: value for rank, value in enumerate(by_rank) if isinstance(value, Raised)}
                result = _first_error(raised) if raised else (check.judge or merge_results)(by_rank)
                if raised and check.communicates:
                    out_of_step = f"'{check.name}'"
        outcome = (result.state, result.saw, result.advice, time.monotonic() - started)
        reports.append(CheckReport(check.part, check.name, check.does, *outcome))
        if is_missing_rank:
            break
    return reports


def _run(check: Check, session: Session) -> Any:
    """Return the value of the check on this rank, or its error as a value."""
    started = time.monotonic()
    try:
        return check.run(session)
    except Exception as error:
        return Raised(time.monotonic() - started, _one_line(error))


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:MESSAGE_LENGTH]


def _first_error(raised: dict[int, Raised]) -> CheckResult:
    """Return a result for the first error. It is the cause: later ones are usually ranks that waited."""
    first = min(raised, key=lambda rank: raised[rank].seconds)
    others = sorted(set(raised) - {first})
    then = f"; then {name_ranks(others)} raised" if others else ""
    return CheckResult("fault", f"rank {first} raised {raised[first].error}{then}", "fix the first error")


def merge_results(results: Sequence[CheckResult]) -> CheckResult:
    """Return the worst of the results of all ranks, with the ranks that have it."""
    worst = max((result.state for result in results), key=STATES.index)
    ranks: dict[CheckResult, list[int]] = {}
    for rank, result in enumerate(results):
        if result.state == worst:
            ranks.setdefault(result, []).append(rank)
    first, *others = ranks
    if worst == "ok" or (not others and len(ranks[first]) == len(results)):
        return first
    saw = "; ".join(f"{name_ranks(ranks[result])}: {result.saw}" for result in ranks)
    return CheckResult(worst, saw[: 2 * MESSAGE_LENGTH], first.advice)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks in words.

    >>> name_ranks([3]), name_ranks([1, 2])
    ('rank 3', 'ranks 1, 2')
    """
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
