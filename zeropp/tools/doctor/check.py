"""Checks, what they find, and how all ranks come to one answer.

[Note: Agreement]
All ranks run the same checks in the same order. After each, they exchange what they saw in a gloo group that
nothing else uses, and everything that is decided follows from what all of them have got: so all ranks take
the same branch.

A check that raises on one rank leaves others in a collective without it. They give up after the timeout of
the job's process groups, and then all ranks meet in the agreement, which waits longer than that. From there
on the job's groups may be out of step, so checks that communicate are left out, and say so.
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
from ...topology import Topology
from ..bench.workload import HEAD_WIDTH
from ..plan.hardware import Hardware
from ..train.world import World

State = Literal["ok", "not run", "warning", "fault"]
STATES: tuple[State, ...] = ("ok", "not run", "warning", "fault")
"""All states, from the best to the worst."""
Part = Literal["surroundings", "kernels", "collectives", "training", "speed"]
PARTS: tuple[Part, ...] = ("surroundings", "kernels", "collectives", "training", "speed")
PATIENCE = 4
"""Agreements wait so many timeouts of the job: a check may have several collectives that fail one by one."""
SHOWN_LENGTH = 300
LOST = "look at what the missing rank has printed; if it hangs: py-spy dump"


@dataclass(frozen=True)
class Finding:
    """What a check saw, and what to do about it: on one rank, or on all."""

    state: State
    saw: str
    advice: str = ""


@dataclass(frozen=True)
class Settings:
    """What the doctor looks at."""

    node_size: int | None = None
    """Ranks per node, in order of rank, as in Config.node_size; not given: found out, as in training."""
    model: str | None = None
    """Model of the speed part: "tiny", "125M", "350M", "1.3B", "18B", or "hf:" and a local path; not given:
    sized to the device."""
    micro_batch: int = 4
    """Sequences per rank and micro-batch of the speed part."""
    micro_batches: int = 1
    """Micro-batches per step of the speed part."""
    sequence: int = 128
    """Tokens of a sequence of the speed part."""
    width: int | None = None
    """Width of the layers by which the speed part measures compute, a multiple of 64: best that of your
    model; not given: 512 on a CPU, 4096 elsewhere."""
    rounds: int = 3
    """How often each strategy gets its turn in the speed part."""

    def __post_init__(self) -> None:
        if self.width is not None and (self.width < 1 or self.width % HEAD_WIDTH):
            raise ValueError(f"width is {self.width!r}; expected a multiple of {HEAD_WIDTH}")
        for name in ("node_size", "micro_batch", "micro_batches", "sequence", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value!r}; expected a positive number")

    def presets(self) -> dict[str, Config]:
        """Every preset, by what a user writes for it."""
        node_size: int | Literal["auto"] = self.node_size or "auto"
        return {
            "Config.off()": Config.off(node_size=node_size),
            "Config.wire16()": Config.wire16(node_size=node_size),
            "Config.paper()": Config.paper(node_size=node_size),
            "Config()": Config(node_size=node_size),
            "Config.four_bit()": Config.four_bit(node_size=node_size),
        }


@dataclass(frozen=True)
class StepTime:
    """How long a step of one strategy took."""

    name: str
    milliseconds: float
    speedup: float
    """Throughput, relative to plain FSDP2."""
    across_bytes: float | None
    """Sent from a node to others in a step; None: nobody counted."""
    hidden: float | None
    """Share of its communication, as long as that would take by itself, which the step does not show. None:
    not known."""


@dataclass(eq=False)  # one is not another
class Visit:
    """What all checks share."""

    settings: Settings
    world: World
    agreement: ProcessGroup
    """See [Note: Agreement]."""
    timeout: timedelta
    """How long ranks wait for each other in the job's process groups."""
    hardware: Hardware | None = None
    """What the speed part measured."""
    steps: list[StepTime] = field(default_factory=list)
    """The same: a line for each strategy."""
    advice: list[str] = field(default_factory=list)
    """What to do about speed, in words."""

    @classmethod
    def begin(cls, settings: Settings, timeout_seconds: float) -> Visit:
        """A visit to all ranks of an initialized process group, whose timeout is `timeout_seconds`."""
        timeout = timedelta(seconds=timeout_seconds)
        agreement = dist.new_group(backend="gloo", timeout=PATIENCE * timeout)
        return cls(settings, World.current(), agreement, timeout)

    @cached_property
    def topology(self) -> Topology:
        """Who is on which node. A collective, at the first use: all ranks use it in the same check first."""
        group = dist.group.WORLD
        assert group is not None
        return Topology.of(group, self.settings.node_size or "auto")

    @property
    def is_alone(self) -> bool:
        return self.world.size == 1

    def exchange(self, mine: Any) -> list[Any]:
        """What every rank has to say, by rank. Raises if one does not come; rank 0 then knows which."""
        dist.monitored_barrier(self.agreement, PATIENCE * self.timeout, wait_all_ranks=True)
        everyone: list[Any] = [None] * self.world.size
        dist.all_gather_object(everyone, mine, group=self.agreement)
        return everyone


@dataclass(frozen=True)
class Check:
    """One thing to try."""

    part: Part
    name: str
    does: str
    """What is tried, in words."""
    run: Callable[[Visit], Any]
    """Does it, on every rank, and returns a Finding, or what `conclude` makes one of."""
    conclude: Callable[[Sequence[Any]], Finding] | None = None
    """Makes a Finding of what all ranks returned, by rank; None: they returned Findings, and the worst of
    them count."""
    communicates: bool = True
    """Whether ranks wait for each other in it."""
    needs_ranks: bool = True
    """Whether there must be more than one rank."""


@dataclass(frozen=True)
class Result:
    """A check with what was found on all ranks."""

    part: Part
    name: str
    does: str
    state: State
    saw: str
    advice: str
    seconds: float


@dataclass(frozen=True)
class Raised:
    """A check that raised on this rank, so many seconds after it began."""

    seconds: float
    error: str


def examine(
    checks: Iterable[Check], visit: Visit, on_progress: Callable[[str, str], None] = lambda part, name: None
) -> list[Result]:
    """Run all checks, on all ranks together; the results are the same on each."""
    results: list[Result] = []
    out_of_step: str | None = None
    for check in checks:
        on_progress(check.part, check.name)
        started = time.monotonic()
        if visit.is_alone and check.needs_ranks:
            finding = Finding("not run", "there is one rank", "start it with torchrun on all nodes")
        elif out_of_step is not None and check.communicates:
            finding = Finding("not run", f"{out_of_step} left ranks out of step", "solve that first")
        else:
            try:
                everyone = visit.exchange(_try(check, visit))
            except RuntimeError as error:  # a rank is gone, or hangs; so will be all that is left to do
                saw = f"ranks have not met again after it: {_in_a_line(error)}"
                results.append(Result(check.part, check.name, check.does, "fault", saw, LOST, 0.0))
                return results
            raised = {rank: said for rank, said in enumerate(everyone) if isinstance(said, Raised)}
            if raised:
                finding = _explain(raised)
                out_of_step = f"'{check.name}'" if check.communicates else out_of_step
            else:
                finding = (check.conclude or merge)(everyone)
        found = (finding.state, finding.saw, finding.advice, time.monotonic() - started)
        results.append(Result(check.part, check.name, check.does, *found))
    return results


def _try(check: Check, visit: Visit) -> Any:
    started = time.monotonic()
    try:
        return check.run(visit)
    except Exception as error:
        return Raised(time.monotonic() - started, _in_a_line(error))


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:SHOWN_LENGTH]


def _explain(raised: dict[int, Raised]) -> Finding:
    """Who raised first is the cause; the others waited for it, as a rule."""
    first = min(raised, key=lambda rank: raised[rank].seconds)
    others = sorted(set(raised) - {first})
    then = f"; then {name_ranks(others)} did, too" if others else ""
    return Finding(
        "fault", f"rank {first} raised {raised[first].error}{then}", "the first error is the one to look at"
    )


def merge(findings: Sequence[Finding]) -> Finding:
    """The worst of what ranks found, with the ranks that found it."""
    worst = max((finding.state for finding in findings), key=STATES.index)
    ranks: dict[Finding, list[int]] = {}
    for rank, finding in enumerate(findings):
        if finding.state == worst:
            ranks.setdefault(finding, []).append(rank)
    first, *others = ranks
    if worst == "ok" or (not others and len(ranks[first]) == len(findings)):
        return first
    saw = "; ".join(f"{name_ranks(ranks[finding])}: {finding.saw}" for finding in ranks)
    return Finding(worst, saw[: 2 * SHOWN_LENGTH], first.advice)


def name_ranks(ranks: Sequence[int]) -> str:
    """
    >>> name_ranks([3]), name_ranks([1, 2])
    ('rank 3', 'ranks 1, 2')
    """
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
