"""`apply(model, "auto")`: tries some Configs in the first steps of a run, and keeps the fastest.

    one visit             2 steps to warm up, 4 that are timed
    first pass            plain -> plain, overlapped -> node shard -> default
    what is far behind is left out, and the others are visited
    in the reverse order  default -> node shard
    the fastest stays     default

Two visits in mirrored order: what gets slower or faster by itself meanwhile does so for all alike.

[Note: Candidates]
Only Configs that are known to end with the loss of plain FSDP2, in order of what they do to numbers: plain
FSDP2, bit for bit; the node shard, which adds up gradients in another order and rounds nothing; the default,
whose loss the convergence study shows to be that of plain FSDP2 (docs/convergence.md). `paper`, `four_bit`
and 16-bit gradients are not among them: that study has them at a higher loss, or not at all.

[Note: What a step is]
From one step of an optimizer to its next one. A second optimizer that steps meanwhile belongs to the same
step, and so does every parameter's own, where optimizers run in backward. On a device with streams the host
waits for the device before it looks at the clock, once in each step of the search. What happens now and then
between two steps (an evaluation, a checkpoint, a compilation) is in the time of one step, and a visit counts
its lower median: half of its steps may be disturbed, and it stays what the others are.

[Note: Same branch on every rank]
The order of visits and their length follow from the number of optimizer steps, which the program takes on all
ranks alike. Times differ between ranks: at the end of a pass all agree, for each step, on the time of the
rank that took longest, and everything is decided from these.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median_low
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ._footprint import Footprint
from ._unit import CompressedUnit, ModelContext, can_overlap
from .comm.ledger import render
from .config import Config
from .fsdp2.units import Unit, is_in_backward

logger = logging.getLogger("zeropp")

WARM_UP_STEPS, TIMED_STEPS = 2, 4
FAR_BEHIND = 1.2
"""A candidate whose first visit took so many times the fastest one's has no second visit."""
AS_FAST = 1.01
"""Candidates that differ by less are as fast: the one stays that does less to numbers."""

PLAIN, NODE_SHARD, DEFAULT = "plain FSDP2", "node shard", "default"


@dataclass(frozen=True)
class Candidate:
    """A Config that may be chosen."""

    name: str
    config: Config
    kept: Footprint
    """What it keeps on this rank."""


class Search:
    """The search of one model for its Config; over as soon as one is chosen."""

    def __init__(self, candidates: Sequence[Candidate], units: Sequence[Unit]) -> None:
        self.candidates = {candidate.name: candidate for candidate in candidates}
        self.chosen: str | None = PLAIN if len(candidates) == 1 else None
        """Name of the candidate that stays; None: not decided yet."""
        self.seconds: dict[str, list[float]] = {name: [] for name in self.candidates}
        """How long a step took in each visit, on the slowest rank: the same on every rank."""
        self._units = list(units)
        self._pass = list(self.candidates)
        """What is visited, in this order, and ..."""
        self._visit = 0
        """... which of them now."""
        self._steps = 0
        self._times: list[float] = []
        """How long steps took in this pass, on this rank."""
        self._clock: float | None = None
        self._stepped: set[int] = set()
        """Optimizers that have stepped in this step."""

    @property
    def config(self) -> Config:
        """What to train with now."""
        return self.candidates[self.chosen or self._pass[self._visit]].config

    @property
    def kept(self) -> Footprint:
        """What the candidate keeps that keeps most: there is one at a time."""
        return max((candidate.kept for candidate in self.candidates.values()), key=lambda kept: kept.total)

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped, with the right Config in place. `config` may be another one then."""
        if self.chosen is not None:
            return
        if self._stepped and id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            return
        self._stepped = {id(optimizer)}
        before, self._clock = self._clock, _now(self._units[0].device)
        if before is None:
            return
        self._steps += 1
        if self._steps > WARM_UP_STEPS:
            self._times.append(self._clock - before)
        if self._steps == WARM_UP_STEPS + TIMED_STEPS:
            self._steps, self._visit = 0, self._visit + 1
            if self._visit == len(self._pass):
                self._end_pass()

    def _end_pass(self) -> None:
        """See [Note: Same branch on every rank]."""
        slowest, self._times = largest_anywhere(self._units, self._times), []
        for number, name in enumerate(self._pass):
            steps = slowest[number * TIMED_STEPS : (number + 1) * TIMED_STEPS]
            self.seconds[name].append(median_low(steps))
        fastest = min(mean(self.seconds[name]) for name in self._pass)
        behind = {name: mean(self.seconds[name]) / fastest for name in self._pass}
        close = [name for name in reversed(self._pass) if behind[name] <= FAR_BEHIND]
        is_first = len(self.seconds[self._pass[0]]) == 1
        self._pass, self._visit = close, 0
        if len(close) == 1 or not is_first:
            self.chosen = next(name for name in self.candidates if behind.get(name, FAR_BEHIND) <= AS_FAST)
            if is_logging_rank(self._units):
                logger.info("zeropp: %s\n%s", self.describe(), self.table())

    def describe(self) -> str:
        """How far it is, in a sentence."""
        if self.chosen is None:
            visit = f"visit {self._visit + 1} of {len(self._pass)}"
            return f"auto tries {', '.join(self.candidates)}: now {self._pass[self._visit]}, {visit}"
        if not self.seconds[self.chosen]:
            return f"auto has chosen {self.chosen}: nothing else can be tried here"
        plain, chosen = (mean(self.seconds[name]) for name in (PLAIN, self.chosen))
        return f"auto has chosen {self.chosen}: {plain / chosen:.2f}x the speed of {PLAIN}"

    def table(self) -> str:
        """Times of all candidates, and what they keep; as text."""
        table = Table(title=self.describe())
        for column in ("", "first visit, ms", "second visit, ms", f"vs {PLAIN}", "kept bytes"):
            table.add_column(column, justify="right" if column else "left")
        for name, candidate in self.candidates.items():
            seconds = self.seconds[name]
            visits = [f"{1e3 * each:,.1f}" for each in seconds] + ["-"] * (2 - len(seconds))
            ratio = f"{mean(self.seconds[PLAIN]) / mean(seconds):.2f}x" if seconds else "-"
            table.add_row(name, *visits, ratio, f"{candidate.kept.total:,}")
        return render(table)

    def state_dict(self) -> dict[str, Any]:
        """What was chosen, and why; empty before."""
        return {} if self.chosen is None else {"chosen": self.chosen, "seconds": dict(self.seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Choose what was chosen, if all ranks say the same and it can be chosen here; else search on.
        Collective."""
        names, chosen = list(self.candidates), state.get("chosen")
        mine = names.index(chosen) if chosen in names else -1
        most, least = largest_anywhere(self._units, [mine, -mine])
        if mine == most == -least and mine >= 0:
            self.chosen = names[mine]
            self.seconds |= {name: list(state["seconds"].get(name, [])) for name in names}


def find_candidates(units: Sequence[Unit], context: ModelContext) -> list[Candidate]:
    """What can be tried on this model, the same on every rank; see [Note: Candidates]. Collective: makes the
    process groups of all of them, before the first step."""
    overlap = any(can_overlap(unit) for unit in units)  # elsewhere plain FSDP2 overlaps by itself
    configs = {PLAIN: Config.off(overlap=not overlap)}
    if overlap:
        configs[f"{PLAIN}, overlapped"] = Config.off()
    configs |= {NODE_SHARD: Config.off(route="two-hop", secondary=True), DEFAULT: Config()}
    found, reasons = {}, {}
    for name, config in configs.items():
        try:
            comms = [CompressedUnit(unit, config, context) for unit in units]
        except ValueError as error:  # nodes of different sizes, as all their ranks see
            reasons[name] = str(error)
            continue
        found[name] = Candidate(name, config, sum((each.will_keep() for each in comms), Footprint()))
        if name != PLAIN and all(each.left_alone for each in comms):
            reasons[name] = "zeropp leaves every unit alone"
        elif name == NODE_SHARD and found[name].kept.node_shard == 0:
            reasons[name] = "on one node there is none to keep"
    cannot = largest_anywhere(units, [float(name in reasons) for name in configs])
    for name, fails in zip(configs, cannot, strict=True):
        if fails and is_logging_rank(units):
            why = reasons.get(name, "it cannot work on another rank")
            logger.warning("zeropp: auto does not try %s: %s", name, why)
    return [found[name] for name, fails in zip(configs, cannot, strict=True) if not fails]


def after_backward(react: Callable[[], None]) -> None:
    """Call `react` now, or at the end of the backward that is running: then nothing is on its way."""
    if not is_in_backward():
        react()
    else:
        Variable._execution_engine.queue_callback(react)


def largest_anywhere(units: Sequence[Unit], values: Sequence[float]) -> list[float]:
    """The largest of each value on any rank that these units are spread over, the same on all of them.
    Collective."""
    agreed = torch.tensor(values, dtype=torch.float32, device=units[0].device)
    for group in _groups(units):
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group)
    return agreed.tolist()


def is_logging_rank(units: Sequence[Unit]) -> bool:
    """Whether this rank is the one that logs."""
    return all(group.rank() == 0 for group in _groups(units))


def _groups(units: Sequence[Unit]) -> list[ProcessGroup]:
    """One for each dimension of each mesh, in the same order on every rank: what goes along all of them goes
    everywhere."""
    meshes = [p.device_mesh for unit in units for p in unit.params if isinstance(p, DTensor)]
    return list(dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups()))


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
