"""`apply(model, "auto")`: try several Configs in the first steps of a run, and keep the fastest.

    one visit             2 steps of warm-up, 4 timed steps
    first pass            plain -> plain, overlapped -> node shard -> default
                          (candidates that are far behind drop out)
    second pass           default -> node shard, in reverse order
    the fastest stays     default

The second pass has the reverse order, so a drift of the machine's speed affects all candidates alike.

[Note: Candidates]
All candidates are known to end with the loss of plain FSDP2. They are ordered by their effect on numbers:
plain FSDP2, bit for bit; the node shard, which sums gradients in another order and rounds nothing; the
default, whose loss equals that of plain FSDP2 in the convergence study (docs/convergence.md). `paper`,
`four_bit` and 16-bit gradients are no candidates: that study measures a higher loss for them, or omits them.

[Note: What a step is]
A step lasts from one step of an optimizer to its next one. Steps of other optimizers in between belong to the
same step, also if every parameter has its own optimizer in backward. On a device with streams, the host waits
for the device before it reads the clock, once in each step of the search. Occasional work between two steps
(an evaluation, a checkpoint, a compilation) counts as part of one step. A visit counts the lower median of
its steps, so up to half of them may be disturbed.

[Note: Same branch on every rank]
The order and the length of visits follow from the number of optimizer steps, which is the same on all ranks.
Times differ between ranks. At the end of a pass, all ranks agree on the time of the slowest rank for each
step, and all decisions use these times.
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
"""Ratio to the fastest candidate in the first pass; a slower candidate has no second visit."""
AS_FAST = 1.01
"""Ratio up to which candidates count as equally fast: the one with the smallest effect on numbers wins."""

PLAIN, NODE_SHARD, DEFAULT = "plain FSDP2", "node shard", "default"


@dataclass(frozen=True)
class Candidate:
    """A Config that the search may choose."""

    name: str
    config: Config
    kept: Footprint
    """Memory that it needs on this rank."""


class Search:
    """The search for the Config of one model. It ends when a Config is chosen."""

    def __init__(self, candidates: Sequence[Candidate], units: Sequence[Unit]) -> None:
        self.candidates = {candidate.name: candidate for candidate in candidates}
        self.chosen: str | None = PLAIN if len(candidates) == 1 else None
        """Name of the chosen candidate; None while the search runs."""
        self.seconds: dict[str, list[float]] = {name: [] for name in self.candidates}
        """Seconds per step of each visit, on the slowest rank: the same on every rank."""
        self._units = list(units)
        self._pass = list(self.candidates)
        """Candidates of the current pass, in the order of visits."""
        self._visit = 0
        """Index of the current visit in `_pass`."""
        self._steps = 0
        self._times: list[float] = []
        """Seconds of each timed step in this pass, on this rank."""
        self._clock: float | None = None
        self._stepped: set[int] = set()
        """Identities of the optimizers that have stepped in this step."""

    @property
    def config(self) -> Config:
        """Config of the current visit, or the chosen one."""
        return self.candidates[self.chosen or self._pass[self._visit]].config

    @property
    def kept(self) -> Footprint:
        """Memory of the largest candidate: only one is installed at a time."""
        return max((candidate.kept for candidate in self.candidates.values()), key=lambda kept: kept.total)

    def after_step(self, optimizer: Optimizer) -> None:
        """Count a step of `optimizer` under the current Config. `config` may change."""
        if self.chosen is not None:
            return
        if self._stepped and id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))  # another optimizer of the same step
            return
        self._stepped = {id(optimizer)}
        before, self._clock = self._clock, _now(self._units[0].device)
        if before is None:  # the first step of a run has no beginning
            return
        self._steps += 1
        if self._steps > WARM_UP_STEPS:
            self._times.append(self._clock - before)
        if self._steps == WARM_UP_STEPS + TIMED_STEPS:
            self._steps, self._visit = 0, self._visit + 1
            if self._visit == len(self._pass):
                self._end_pass()

    def _end_pass(self) -> None:
        """Choose a candidate, or start the second pass; see [Note: Same branch on every rank]."""
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
            # `candidates` is in order of effect on numbers: the first one that is as fast wins.
            self.chosen = next(name for name in self.candidates if behind.get(name, FAR_BEHIND) <= AS_FAST)
            if is_logging_rank(self._units):
                logger.info("zeropp: %s\n%s", self.describe(), self.table())

    def describe(self) -> str:
        """Return the progress of the search in one sentence."""
        if self.chosen is None:
            visit = f"visit {self._visit + 1} of {len(self._pass)}"
            return f"auto tries {', '.join(self.candidates)}: now {self._pass[self._visit]}, {visit}"
        if not self.seconds[self.chosen]:
            return f"auto has chosen {self.chosen}: nothing else can be tried here"
        plain, chosen = (mean(self.seconds[name]) for name in (PLAIN, self.chosen))
        return f"auto has chosen {self.chosen}: {plain / chosen:.2f}x the speed of {PLAIN}"

    def table(self) -> str:
        """Return times and memory of all candidates as text."""
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
        """Return the choice and the measured times; empty while the search runs."""
        return {} if self.chosen is None else {"chosen": self.chosen, "seconds": dict(self.seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the choice if all ranks have the same one and it is a candidate here. Otherwise the search
        continues. Collective."""
        names, chosen = list(self.candidates), state.get("chosen")
        mine = names.index(chosen) if chosen in names else -1
        most, least = largest_anywhere(self._units, [mine, -mine])  # maximum, and negated minimum
        if mine == most == -least and mine >= 0:
            self.chosen = names[mine]
            self.seconds |= {name: list(state["seconds"].get(name, [])) for name in names}


def find_candidates(units: Sequence[Unit], context: ModelContext) -> list[Candidate]:
    """Return the candidates for this model, the same on every rank; see [Note: Candidates]. Collective:
    creates the process groups of all candidates, before the first step."""
    overlap = any(can_overlap(unit) for unit in units)  # elsewhere, streams overlap plain FSDP2
    configs = {PLAIN: Config.off(overlap=not overlap)}
    if overlap:
        configs[f"{PLAIN}, overlapped"] = Config.off()
    configs |= {NODE_SHARD: Config.off(route="two-hop", secondary=True), DEFAULT: Config()}
    found, reasons = {}, {}
    for name, config in configs.items():
        try:
            comms = [CompressedUnit(unit, config, context) for unit in units]
        except ValueError as error:  # nodes of different sizes: all their ranks raise
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
    """Call `react` now, or at the end of the running backward, when no transfer is on its way."""
    if not is_in_backward():
        react()
    else:
        Variable._execution_engine.queue_callback(react)


def largest_anywhere(units: Sequence[Unit], values: Sequence[float]) -> list[float]:
    """Return the maximum of each value over all ranks of these units. Collective."""
    agreed = torch.tensor(values, dtype=torch.float32, device=units[0].device)
    for group in _groups(units):
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group)
    return agreed.tolist()


def is_logging_rank(units: Sequence[Unit]) -> bool:
    """Whether this rank is the one rank that logs."""
    return all(group.rank() == 0 for group in _groups(units))


def _groups(units: Sequence[Unit]) -> list[ProcessGroup]:
    """Return one group for each dimension of each mesh, in the same order on every rank. All-reduces over all
    of them reach every rank."""
    meshes = [p.device_mesh for unit in units for p in unit.params if isinstance(p, DTensor)]
    return list(dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups()))


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)  # the host runs ahead of the device
    return time.perf_counter()
