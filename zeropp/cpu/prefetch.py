"""Gathers that start early, on a CPU: an all-gather that wraps zeropp's own. With streams, FSDP2 overlaps
them.

[Note: Early gathers]
In backward, FSDP2 gathers the next unit before it computes the current one. In forward it leaves overlap to
the device's streams, and a CPU has none. So the first forward is recorded, and then FSDP2's own
`set_modules_to_forward_prefetch` makes it gather units while the units before them compute, unless the user
has set it. FSDP2 asks for them when it has the current unit's weights. With one early unit, the link would
idle from the end of a gather until the next one is encoded; with two, the next one is on its way already
(comm_threads.py). For the same reason the second unit is gathered together with the first, before FSDP2
prepares the forward. Three units are gathered at a time, but not at the end of forward, where memory is
scarce: no unit is left to gather.

[Note: Gathered and not used]
A unit that a forward skips is gathered for nothing, and so is a unit on its way when a forward raises. FSDP2
holds these weights for the unit's next use, without a check. So an early gather serves one forward only: the
next forward makes FSDP2 forget it, and the unit is gathered again, with zeropp's checks. FSDP2 also forgets
it when weights
change: after an optimizer step, a load and `invalidate()`. If a gather fails, all gathers on their way are
given
up: their weights may be stale as well, and the failed one left nothing to compute with.

Such a gather has no effect on later ones. With weights="delta-int4", a difference that no forward has used
would change the next difference. So if weights change before a forward uses them, the node shard returns to
its state before the early gather (`NodeShard.undo_unused`). Until the forward, it holds a copy of the
reference: of two units at a time, unless a forward skips units.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from ..comm import AllGather
from ..comm.execution import Comm
from ..fsdp2.units import Unit, is_in_backward
from .comm_threads import ThreadWork
from .late_gradients import LateGradients

PREFETCHED_UNITS = 2


class Prefetch:
    """Records the order of units in the first forward; see [Note: Early gathers]."""

    def __init__(self) -> None:
        self.units: set[Unit] = set()
        """Units of the model whose gathers run in a comm thread."""
        self._order: list[Unit] = []
        self._prefetching: list[Unit] = []
        """Units for which FSDP2's forward prefetch was set."""
        self._is_known = False
        self._hooks: list[RemovableHandle] = []

    def before_gather(self, unit: Unit) -> None:
        if self._is_known:
            return
        if unit.is_in_forward and unit not in self._order:
            self._order.append(unit)
        else:  # the first backward, or the second forward
            self._is_known = True
            if not any(known.has_forward_prefetch for known in self._order):
                self._set_forward_prefetch()

    def _set_forward_prefetch(self) -> None:
        self._prefetching = self._order[:-1]
        for place, unit in enumerate(self._prefetching, 1):
            unit.set_forward_prefetch(self._order[place : place + PREFETCHED_UNITS])
        if self._prefetching:
            self._hooks = self._order[0].before_forward(self._gather_first_units)

    def _gather_first_units(self) -> None:
        if is_in_backward():  # a recomputation
            return
        for unit in self._order:  # [Note: Gathered and not used]
            unit.drop_early_gather()
        for unit in self._order[:2]:
            unit.gather_early()

    def give_up_gathers(self) -> None:
        """Forget gathers without a wait: on other ranks they may wait for this one."""
        for unit in self.units:
            for work in unit.forget_early_gather():
                if isinstance(work, ThreadWork):
                    work.discard()

    def remove(self) -> None:
        """Restore FSDP2's settings, and record the order again if there is another forward."""
        for unit in self._prefetching:
            unit.set_forward_prefetch([])
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._order, self._prefetching, self._is_known = [], [], False


class PrefetchingAllGather(Comm):
    """Wraps an all-gather that runs in a comm thread."""

    def __init__(self, inner: AllGather, unit: Unit, prefetch: Prefetch, late: LateGradients) -> None:
        self._inner, self._unit, self._prefetch, self._late = inner, unit, prefetch, late
        prefetch.units.add(unit)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._late.abandon_failed()
        self._prefetch.before_gather(self._unit)
        work = self._inner(output_tensor, input_tensor, group, async_op=True)
        if isinstance(work, ThreadWork):
            work.before_raise = self._prefetch.give_up_gathers
        return work
