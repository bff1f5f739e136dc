"""Reductions that FSDP2 does not wait for, on a CPU: a reduce-scatter that wraps zeropp's own.

[Note: Gradients that come late]
FSDP2 uses the output of a reduce-scatter as soon as the call returns. Where a parameter has no `.grad` yet,
FSDP2 makes it a view of that output, so a reduction may run in a comm thread and write into the view. Where
FSDP2 reads the output (it adds it to `.grad`, or converts it), it gets negative zeros: any number can be
added to -0.0 without a change of a bit (0.0 would turn -0.0 into 0.0). The result is then added to `.grad`
later in the training thread, when another reduction starts or at the end of backward. A callback of the
autograd engine, which runs after FSDP2's own, waits for all reductions. `.grad` is then bit for bit what it
is without overlap.

A unit that a forward uses twice is reduced twice: the second reduction starts when `.grad` has the first one.
Where somebody reads earlier (hooks on parameters, CPU offload, HSDP's all-reduce, a division after the sum),
the call waits for its reduction, as without overlap. All of this follows from the program, so all ranks do
the same.

[Note: Memory of late gradients]
FSDP2 holds the full gradients of as many reductions as `set_reduce_scatter_max_input_buffers` says, one by
default. No more are held here, so a unit's full gradients live no longer than on a GPU. They may be freed,
and the next ones may come, once a reduction has encoded them. The additional memory is the buffers of two
reductions, and a rank's shard of their result where `.grad` is not a view of it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import ProcessGroup, ReduceOp

from ..comm import ReduceScatter
from ..comm.execution import Comm
from ..fsdp2.units import Unit, is_in_backward
from .comm_threads import ThreadWork

logger = logging.getLogger("zeropp")


@dataclass
class LateReduction:
    """A reduction that runs while FSDP2 goes on."""

    unit: Unit
    work: dist.Work
    full_bytes: int
    """Size of the full gradients, which must not change until they are read."""
    full: Tensor | None
    """The full gradients, where `work` is the backend's own and may not hold them."""
    reduced: Tensor
    """This rank's shard of the sum, when `work` is done."""
    is_gradient: bool
    """Whether `.grad` is a view of `reduced`."""

    @property
    def is_read(self) -> bool:
        return self.work.is_read() if isinstance(self.work, ThreadWork) else self.work.is_completed()

    @property
    def nbytes(self) -> int:
        return (0 if self.is_gradient else self.reduced.nbytes) + (0 if self.is_read else self.full_bytes)

    def wait_until_read(self) -> None:
        self.work.wait_until_read() if isinstance(self.work, ThreadWork) else self.work.wait()

    def finish(self) -> None:
        """Wait for the result, and put it into `.grad`."""
        self.work.wait()
        if self.is_gradient:
            self.unit.check_gradients_are_of(self.reduced)
        else:
            self.unit.add_to_gradients(self.reduced)

    def abandon(self) -> None:
        """The backward has raised: its result is lost, as if nothing had been reduced."""
        try:
            self.work.wait()
        except Exception as error:
            logger.debug("zeropp: error in a reduction of a backward that has raised: %s", error)
        if self.is_gradient:
            self.reduced.zero_()


class LateGradients:
    """The late reductions of one model; see [Note: Gradients that come late]."""

    def __init__(self) -> None:
        self._late: dict[int, list[LateReduction]] = {}
        """Reductions by their backward."""

    @property
    def nbytes(self) -> int:
        """Bytes that are held for reductions."""
        return sum(reduction.nbytes for late in self._late.values() for reduction in late)

    def expect(self, reduction: LateReduction) -> None:
        """At the end of the running backward, put this reduction into `.grad`."""
        backward = torch._C._current_graph_task_id()
        if backward not in self._late:
            self._late[backward] = []
            Variable._execution_engine.queue_callback(lambda: self._finish(backward))
        self._late[backward].append(reduction)

    def make_room(self, most: int) -> None:
        """Before a reduction starts: hold full gradients of less than `most`, and take results that are
        there."""
        late = self._late.get(torch._C._current_graph_task_id(), [])
        unread = [reduction for reduction in late if not reduction.is_read]
        for reduction in unread[: max(0, len(unread) + 1 - most)]:
            reduction.wait_until_read()
        while late and late[0].work.is_completed():
            late.pop(0).finish()

    def finish_unit(self, unit: Unit) -> None:
        """Before a second reduction of a unit in one backward: FSDP2 adds it to `.grad`, which may be the
        buffer that the first one still writes to."""
        late = self._late.get(torch._C._current_graph_task_id(), [])
        for reduction in [reduction for reduction in late if reduction.unit is unit]:
            reduction.finish()
        late[:] = [reduction for reduction in late if reduction.unit is not unit]

    def _finish(self, backward: int) -> None:
        for reduction in self._late.pop(backward, []):
            reduction.finish()

    def abandon_failed(self) -> None:
        """Outside of a backward: wait for reductions of a backward that has raised, before `.grad` is read or
        written."""
        while self._late and not is_in_backward():
            _, late = self._late.popitem()
            for reduction in late:
                reduction.abandon()


class LateReduceScatter(Comm):
    """Wraps a reduce-scatter that runs in a comm thread: FSDP2 goes on while it runs."""

    def __init__(self, inner: ReduceScatter, unit: Unit, late: LateGradients) -> None:
        self._inner, self._unit, self._late = inner, unit, late

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
        *,
        is_flush: bool = False,
    ) -> None:
        self._late.finish_unit(self._unit)
        if not self._may_be_late(output_tensor, op):
            work = self._inner(output_tensor, input_tensor, group, op, async_op=True, is_flush=is_flush)
            if work is not None:
                work.wait()
            return
        self._late.make_room(self._unit.most_reductions)
        is_gradient = self._unit.makes_gradients_of(output_tensor)
        reduced = output_tensor if is_gradient else torch.empty_like(output_tensor)
        work = self._inner(reduced, input_tensor, group, op, async_op=True, is_flush=is_flush)
        if work is None:
            return
        if not is_gradient:
            output_tensor.fill_(-0.0)
        full = None if isinstance(work, ThreadWork) else input_tensor
        self._late.expect(LateReduction(self._unit, work, input_tensor.nbytes, full, reduced, is_gradient))

    def _may_be_late(self, output: Tensor, op: ReduceOp | ReduceOp.RedOpType) -> bool:
        """Whether FSDP2 uses the output only for `.grad`, and takes it as it is: it divides plain sums."""
        divides = getattr(op, "op", op) == ReduceOp.SUM
        return is_in_backward() and not divides and self._unit.takes_gradients_late(output.numel())
