"""Recorder of a training step: writes down its events and its memory.

    program      gather of a   forward of a          gather of b   forward of b          backward of b
    operations   [  comm   ]   mm add mm ...         [  comm   ]   mm add mm ...         mm mm add ...
    events       Gather(a)     Compute(a, forward)   Gather(b)     Compute(b, forward)   Compute(b, backward)
    memory       peak          peak                  peak          peak                  peak

Consecutive operations of one unit and phase, outside of comms, are one Compute event. The memory of an event
is the peak since the event before.

The recorder has three sources:
- operations, from a dispatch mode: FLOPs, bytes, new storages
- calls of comms, from `RecordedComm`: their hops, which the ledger has counted
- hooks on the units, from `CurrentUnit`: the unit and the phase that an operation belongs to
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ... import Ledger
from ...fsdp2.units import ROOT, gather_copies
from .memory_estimate import LiveStorages, MemoryEstimate
from .op_cost import work_of
from .repeat_layers import StepPart
from .trace import Compute, Event, Gather, Phase, Reduce, ShardGroup, all_reduce_hop

_, COPY_OUT = gather_copies()
DEVICE_OF = torch.ops.prim.device.default


class CurrentUnit:
    """The unit and the phase that operations belong to at the moment.

    Forward is a stack of modules. A unit's backward starts when the gradients of its outputs arrive, and ends
    when the gradients of its inputs do.
    """

    def __init__(self) -> None:
        self._forward = [ROOT]
        self._backward = ROOT
        self._optimizer: str | None = None

    def watch(self, unit: str, module: nn.Module) -> None:
        """Hook into the forward and the backward of `module`."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._forward.append(unit)
            for tensor in _differentiable((args, kwargs)):
                tensor.register_hook(lambda _: self._leave_backward(unit))  # type: ignore[no-untyped-call]

        def leave(module: nn.Module, args: Any, outputs: Any) -> None:
            self._forward.pop()
            for tensor in _differentiable(outputs):
                tensor.register_hook(lambda _: self._enter_backward(unit))  # type: ignore[no-untyped-call]

        # FSDP2's own hooks gather and reduce. These hooks enclose them, so that FSDP2's copies for a unit
        # count for this unit.
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(leave, prepend=True)

    @contextmanager
    def optimizer_of(self, unit: str) -> Iterator[None]:
        """Count operations inside as the optimizer's, on the parameters of `unit`."""
        self._optimizer = unit
        yield
        self._optimizer = None

    def get(self) -> tuple[str, Phase]:
        """Return the unit and the phase."""
        if self._optimizer is not None:
            return self._optimizer, "optimizer"
        if torch._C._current_graph_task_id() == -1:  # not in a backward
            return self._forward[-1], "forward"
        # Only activation checkpointing turns gradients on inside a backward.
        return self._backward, "recompute" if torch.is_grad_enabled() else "backward"

    def end_backward(self) -> None:
        """Leave the unit whose inputs need no gradients, and whose end no hook has seen."""
        self._backward = ROOT

    def _enter_backward(self, unit: str) -> None:
        self._backward = unit

    def _leave_backward(self, unit: str) -> None:
        # A unit's inputs are the outputs of the unit before, which may already have been entered.
        if self._backward == unit:
            self._backward = ROOT


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that run inside. Memory counts only if it was allocated inside, so enter it
    before the model is built."""

    def __init__(self, storages: LiveStorages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_unit = CurrentUnit()
        self._storages = storages
        self._breakdown: Callable[[], MemoryEstimate] | None = None
        self._recorded: StepPart = []
        self._in_comm = False
        # The Compute event that is not finished, and the memory peak since the last event.
        self._span: tuple[str, Phase] = (ROOT, "forward")
        self._flops = 0
        self._bytes_touched = 0
        self._peak: MemoryEstimate | None = None

    def start(self, breakdown: Callable[[], MemoryEstimate]) -> None:
        """Start to record events. Before this call only storages are counted.

        Args:
            breakdown: returns the memory in use at the moment, by purpose.
        """
        self._breakdown = breakdown

    @contextmanager
    def comm(self) -> Iterator[None]:
        """Count operations inside as a comm's, and not as compute."""
        if self._flops:  # without FLOPs, the span has only FSDP2's copies, which count for the next one
            self._close_span()
        self._in_comm = True
        yield
        self._in_comm = False

    def add(self, event: Event) -> None:
        """Append an event, with the memory peak since the last one."""
        if self._breakdown is not None:
            self._recorded.append((event, self._update_peak()))
            self._peak = None

    def add_replica_reduction(self, unit: str, gradients: Tensor, ranks: int) -> None:
        """Add HSDP's all-reduce of a shard of gradients, as a hop of the reduction inside the node."""
        hop = all_reduce_hop(gradients.numel(), gradients.itemsize, ranks)
        last = self._recorded[-1][0] if self._recorded and not self._flops else None
        if isinstance(last, Reduce) and last.unit == unit:
            self._recorded.pop()
            self.add(Reduce(unit, (*last.hops, hop)))
        else:  # with one rank per node there is no reduction inside the node
            self._close_span()
            self.add(Reduce(unit, (hop,)))

    def take(self) -> StepPart:
        """Return the events since the last call, each with the memory peak since the event before."""
        self._close_span()
        self.current_unit.end_backward()
        recorded, self._recorded = self._recorded, []
        return recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's dispatch runs first, and sends the local operation here again
        if func is DEVICE_OF:  # the most frequent call, and a fake tensor stores the answer
            return args[0].fake_device
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = [tensor for tensor in tree_iter(out) if isinstance(tensor, Tensor)]
        memory_grew = self._count_storages(func, kwargs, results)
        if self._breakdown is not None:
            if not self._in_comm:
                self._count_work(func, args, kwargs, out, results)
            if memory_grew or self._peak is None:
                self._update_peak()
        return out

    def _count_storages(self, func: Any, kwargs: Any, results: list[Tensor]) -> bool:
        """Return whether the operation may have made memory grow."""
        has_new = [self._storages.add(tensor) for tensor in results]
        if func._overloadpacket != COPY_OUT:
            return any(has_new)
        self._storages.add_resized(kwargs["out"])  # FSDP2 has resized them to hold gathered weights
        return True

    def _count_work(self, func: Any, args: Any, kwargs: Any, out: Any, results: list[Tensor]) -> None:
        span = self.current_unit.get()
        if span != self._span:
            self._close_span()
            self._span = span
        flops, bytes_touched = work_of(func, args, kwargs, out, results)
        self._flops += flops
        self._bytes_touched += bytes_touched

    def _close_span(self) -> None:
        if self._flops or self._bytes_touched:
            self.add(Compute(*self._span, self._flops, self._bytes_touched))
        self._flops = self._bytes_touched = 0

    def _update_peak(self) -> MemoryEstimate:
        assert self._breakdown is not None
        if self._peak is None or self._storages.nbytes > self._peak.peak:
            self._peak = self._breakdown()
        return self._peak


class RecordedComm:
    """A comm of a unit that reports its calls to a recorder. FSDP2 calls it like any other comm."""

    def __init__(
        self,
        comm: Any,
        kind: type[Gather] | type[Reduce],
        unit: str,
        shard_group: ShardGroup,
        ledger: Ledger,
        recorder: StepRecorder,
    ) -> None:
        self._comm, self._kind, self._unit = comm, kind, unit
        self._shard_group, self._ledger, self._recorder = shard_group, ledger, recorder

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._comm.allocate(size, dtype=dtype, device=device)  # type: ignore[no-any-return]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, *args: Any, **kwargs: Any
    ) -> Any:
        self._ledger.reset()  # so that it holds this call alone
        with self._recorder.comm():
            result = self._comm(output_tensor, input_tensor, group, *args, **kwargs)
        hops = self._shard_group.hops_of(self._ledger, gathered_over=group.size())
        self._recorder.add(self._kind(self._unit, hops))
        return result


def _differentiable(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]
