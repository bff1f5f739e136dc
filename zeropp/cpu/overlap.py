"""Overlap on a CPU: FSDP2 computes while cpu/comm_threads.py sends. With streams, FSDP2 does it by itself.

[Note: Gradients that come late]
FSDP2 uses what a reduce-scatter has written as soon as the call returns. Where there is no `.grad` yet, it
makes it of views of that buffer, so a reduction may go on in a lane, and write into them. Where FSDP2 reads
the buffer (it adds it to `.grad`, or converts it), it gets negative zeros, to which any number can be added
without changing a bit of it (0.0 would turn -0.0 into 0.0), and what was reduced is added later, in the
training thread: when another reduction starts, or at the end of backward. A callback of the autograd engine,
which runs after FSDP2's own, waits for all reductions. `.grad` is then what it would be without overlap, bit
for bit. A unit that a forward uses twice is reduced twice: the second reduction starts when `.grad` has the
first. Where somebody looks earlier (hooks on parameters, CPU offload, HSDP's all-reduce, a division after
the sum), the call waits for its reduction, as without overlap. All of this is known from the program, so it
is the same on every rank.

[Note: Memory of what is late]
FSDP2 keeps the full gradients of so many reductions as `set_reduce_scatter_max_input_buffers` says, one by
default. Not more than that are kept here, so a unit's full gradients live no longer than on a GPU. Once a
reduction has encoded them, they may go, and the next one may come, while it is still on its way. What comes
on top are the buffers of two reductions, and a rank's shard of them where `.grad` is not made of it.

[Note: Early gathers]
In backward FSDP2 gathers the next unit before it computes this one. In forward it leaves that to the
device's streams, and a CPU has none. So the first forward is watched, and then FSDP2's own
`set_modules_to_forward_prefetch` is told to gather units while those before them compute, unless the user has
told it something. FSDP2 asks for them when it has got this unit's weights, so with one unit early the link
would stand still from the end of one gather until the next one is encoded. With two, the next one is already
on its way (comm_threads.py). For the same reason the second unit is asked for together with the first,
before FSDP2 prepares the forward. All this holds the weights of three units at a time, but not at
the end of forward, where memory is scarce: there is no unit left to gather.

[Note: Gathered and not used]
A unit that a later forward leaves out is gathered for nothing, and so is what was on its way when a forward
has raised. FSDP2 keeps that for the unit's next use, and does not ask whether it is still good. So it is made
to forget it whenever weights change: after an optimizer's step, a load, `invalidate()`, and, where operations
on parameters have moved their version, before the next forward. If a gather itself has failed, all that were
asked for are given up: their weights may be as stale, and what has failed left nothing to compute with.

Such a gather has no effect on later ones. With weights="delta-int4", a difference that no forward has used
would change the next difference. So if weights change before a forward uses them, the node shard returns to
its state before the early gather (`NodeShard.undo_unused`). Until the forward, it keeps a copy of the
reference: of two units at a time, unless a forward leaves units out.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from ..fsdp2.units import Unit
from .comm_threads import ThreadWork

logger = logging.getLogger("zeropp")

PREFETCHED_UNITS = 2


@dataclass
class Reduction:
    """Gradients of a unit on their way."""

    unit: Unit
    work: dist.Work
    full_bytes: int
    """Size of the full gradients, which must stay as they are until they are read."""
    full: Tensor | None
    """They themselves, where `work` is the backend's own, and need not keep them."""
    reduced: Tensor
    """This rank's shard of their sum, when `work` is done."""
    is_gradient: bool
    """Whether `.grad` is made of `reduced`."""

    @property
    def is_read(self) -> bool:
        return self.work.is_read() if isinstance(self.work, ThreadWork) else self.work.is_completed()

    @property
    def nbytes(self) -> int:
        return (0 if self.is_gradient else self.reduced.nbytes) + (0 if self.is_read else self.full_bytes)

    def wait_until_read(self) -> None:
        self.work.wait_until_read() if isinstance(self.work, ThreadWork) else self.work.wait()

    def finish(self) -> None:
        """Wait for it; then it is in `.grad`."""
        self.work.wait()
        if self.is_gradient:
            self.unit.check_gradients_are_of(self.reduced)
        else:
            self.unit.add_to_gradients(self.reduced)

    def give_up(self) -> None:
        """It is of a backward that has raised: what it brings is lost, as if it had not been reduced."""
        try:
            self.work.wait()
        except Exception as error:
            logger.debug("zeropp: a reduction of a backward that has failed: %s", error)
        if self.is_gradient:
            self.reduced.zero_()


class LateGradients:
    """The reductions of one model that are on their way; see [Note: Gradients that come late]."""

    def __init__(self) -> None:
        self._coming: dict[int, list[Reduction]] = {}
        """Reductions by the backward that they are of."""

    @property
    def nbytes(self) -> int:
        """What is held for reductions on their way."""
        return sum(reduction.nbytes for coming in self._coming.values() for reduction in coming)

    def expect(self, reduction: Reduction) -> None:
        """At the end of the backward that runs now, add to `.grad` what will have been reduced."""
        backward = torch._C._current_graph_task_id()
        if backward not in self._coming:
            self._coming[backward] = []
            Variable._execution_engine.queue_callback(lambda: self._finish(backward))
        self._coming[backward].append(reduction)

    def make_room(self, most: int) -> None:
        """Before a reduction starts: keep full gradients of less than `most`, and take what has arrived."""
        coming = self._coming.get(torch._C._current_graph_task_id(), [])
        unread = [reduction for reduction in coming if not reduction.is_read]
        for reduction in unread[: max(0, len(unread) + 1 - most)]:
            reduction.wait_until_read()
        while coming and coming[0].work.is_completed():
            coming.pop(0).finish()

    def finish_unit(self, unit: Unit) -> None:
        """Before another reduction of the unit in the same backward: FSDP2 adds it to `.grad`, which may be
        the buffer that the last one still writes to."""
        coming = self._coming.get(torch._C._current_graph_task_id(), [])
        for reduction in [reduction for reduction in coming if reduction.unit is unit]:
            reduction.finish()
        coming[:] = [reduction for reduction in coming if reduction.unit is not unit]

    def _finish(self, backward: int) -> None:
        for reduction in self._coming.pop(backward, []):
            reduction.finish()

    def forget_failed(self) -> None:
        """Outside of any backward: what is still here is of one that has raised, and is lost with it."""
        while self._coming:
            _, coming = self._coming.popitem()
            for reduction in coming:
                reduction.give_up()


class ForwardPrefetch:
    """Learns the order of units in the first forward; see [Note: Early gathers]."""

    def __init__(self) -> None:
        self._order: list[Unit] = []
        self._told: list[Unit] = []
        self._is_known = False
        self._hooks: list[RemovableHandle] = []
        self._versions: dict[Unit, list[int]] = {}
        """Versions of the weights that were last gathered."""

    def gathers(self, unit: Unit) -> None:
        """A unit is about to be gathered."""
        self._versions[unit] = unit.version()
        if self._is_known:
            return
        if unit.is_in_forward and unit not in self._order:
            self._order.append(unit)
        else:  # the first backward, or the second forward
            self._is_known = True
            if not any(known.has_forward_prefetch for known in self._order):
                self._told = self._order[:-1]
                for place, known in enumerate(self._told, 1):
                    known.set_forward_prefetch(self._order[place : place + PREFETCHED_UNITS])
                if self._told:
                    self._hooks = self._order[0].before_forward(self._gather_first)

    def _gather_first(self) -> None:
        if is_in_backward():  # a recomputation
            return
        for unit in self._order:  # [Note: Gathered and not used]
            if unit.has_early_gather and unit.version() != self._versions[unit]:
                unit.drop_early_gather()
        for unit in self._order[:2]:
            unit.gather_early()

    def remove(self) -> None:
        """Leave FSDP2 as it was, and learn anew if there is another forward."""
        for unit in self._told:
            unit.set_forward_prefetch([])
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._order, self._told, self._is_known = [], [], False


def is_in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def can_overlap(unit: Unit) -> bool:
    """Whether the unit is on a CPU, with a backend that sends while others compute."""
    return unit.device.type == "cpu" and unit.group is not None and "gloo" in dist.get_backend(unit.group)


class Overlap:
    """What one model needs for it."""

    def __init__(self) -> None:
        self.late = LateGradients()
        self.prefetch = ForwardPrefetch()
        self.units: set[Unit] = set()

    def forget_failed(self) -> None:
        """Between two backwards: wait for reductions of a backward that has raised, before somebody writes to
        `.grad` or reads it."""
        if not is_in_backward():
            self.late.forget_failed()

    def give_up_gathers(self) -> None:
        """Without waiting: see [Note: Gathered and not used]. On other ranks they may wait for this one."""
        for unit in self.units:
            for work in unit.forget_early_gather():
                if isinstance(work, ThreadWork):
                    work.give_up()

    def remove(self) -> None:
        """Leave FSDP2 as it was, with nothing on its way."""
        self.late.forget_failed()
        self.prefetch.remove()


class UnitOverlap:
    """The overlap of one unit, as its comms see it."""

    def __init__(self, unit: Unit, overlap: Overlap) -> None:
        self._unit, self._overlap = unit, overlap
        overlap.units.add(unit)

    def before_gather(self) -> None:
        """Called in the training thread."""
        self._overlap.forget_failed()
        self._overlap.prefetch.gathers(self._unit)

    def gather_failed(self) -> None:
        """Called in the training thread, before it raises."""
        self._overlap.give_up_gathers()

    def late_place(self, output: Tensor) -> Tensor | None:
        """Where to reduce to while FSDP2 goes on, if it expects the result in `output`; one may start now.
        None: it must be there when FSDP2 goes on."""
        self._overlap.late.finish_unit(self._unit)
        if not (is_in_backward() and self._unit.takes_gradients_late(output.numel())):
            return None
        self._overlap.late.make_room(self._unit.most_reductions)
        return output if self._unit.makes_gradients_of(output) else torch.empty_like(output)

    def expect(self, work: dist.Work, gradients: Tensor, reduced: Tensor, output: Tensor) -> None:
        """See [Note: Gradients that come late]."""
        is_gradient = reduced is output
        if not is_gradient:
            output.fill_(-0.0)
        full = None if isinstance(work, ThreadWork) else gradients
        self._overlap.late.expect(Reduction(self._unit, work, gradients.nbytes, full, reduced, is_gradient))
