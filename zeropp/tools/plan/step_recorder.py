"""The recorder of a step: watches a sharded model in training and writes down events and memory.

It sees three things. Every operation, as a dispatch mode: FLOPs, bytes, new storages. Every call of a comm,
from a bracket around it: its hops are the difference of the ledger after it and before. And where the program
is, from hooks on the units: in forward by a stack, in backward by the gradients that arrive at a unit's
outputs (it is entered) and at its inputs (it is left).
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
from .trace import Compute, Event, Gather, Phase, Reduce, ShardGroup, TracedHop, all_reduce_hop

_, COPY_OUT = gather_copies()
DEVICE_OF = torch.ops.prim.device.default


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it before the model is built: what it has not seen, it does not count."""

    def __init__(self, storages: LiveStorages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded: list[tuple[Event, MemoryEstimate]] = []
        self._storages = storages
        self._breakdown: Callable[[], MemoryEstimate] | None = None
        self._stack: list[str] = [ROOT]
        self._backward_unit = ROOT
        self._optimizing: str | None = None
        self._in_comm = False
        self._span: tuple[str, Phase] = (ROOT, "forward")
        self._flops = 0
        self._bytes_touched = 0
        self._peak: MemoryEstimate | None = None
        self._peak_bytes = -1

    def start(self, breakdown: Callable[[], MemoryEstimate]) -> None:
        """Record from now on, and not only count storages. `breakdown` says what memory is used for at the
        moment."""
        self._breakdown = breakdown

    def watch(self, unit: str, module: nn.Module) -> None:
        """Know when `module`'s forward and backward run."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._stack.append(unit)
            for tensor in _differentiable((args, kwargs)):
                tensor.register_hook(lambda _: self._leave_backward(unit))  # type: ignore[no-untyped-call]

        def leave(module: nn.Module, args: Any, outputs: Any) -> None:
            self._stack.pop()
            for tensor in _differentiable(outputs):
                tensor.register_hook(lambda _: self._enter_backward(unit))  # type: ignore[no-untyped-call]

        # FSDP2 gathers in hooks before forward and on the gradients of outputs, and reduces in a function
        # that it puts behind the inputs. What it does for a unit is that unit's: ours enclose them.
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(leave, prepend=True)

    @contextmanager
    def optimizer_of(self, unit: str) -> Iterator[None]:
        """What runs inside is the optimizer's, on the parameters of this unit."""
        self._optimizing = unit
        yield
        self._optimizing = None

    @contextmanager
    def comm(self, event: Callable[[], Event]) -> Iterator[None]:
        """What runs inside is a comm's; afterwards `event` says what it was."""
        if self._flops:  # or there were only FSDP2's copies, which then count with what they are for
            self._close_span()
        self._in_comm = True
        yield
        self._in_comm = False
        self._append(event())

    def take(self) -> list[tuple[Event, MemoryEstimate]]:
        """All events since the last call, each with the memory when it was largest since the one before."""
        self._close_span()
        self._backward_unit = ROOT
        recorded, self._recorded = self._recorded, []
        return recorded

    def replicas_reduced(self, unit: str, gradients: Tensor, ranks: int) -> None:
        """HSDP has all-reduced a shard of gradients, which it had just reduced inside the node."""
        hops: tuple[TracedHop, ...] = (all_reduce_hop(gradients.numel(), gradients.itemsize, ranks),)
        last = self._recorded[-1][0] if self._recorded and not self._flops else None
        if isinstance(last, Reduce) and last.unit == unit:
            hops, _ = last.hops + hops, self._recorded.pop()
        else:  # one rank a node: there is nothing else to reduce
            self._close_span()
        self._append(Reduce(unit, hops))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own dispatch comes first; the operation on the local part comes here
        if func is DEVICE_OF:  # most calls are this question; a fake tensor has its answer at hand
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        results = [tensor for tensor in tree_iter(out) if isinstance(tensor, Tensor)]
        are_new = [self._storages.see(tensor) for tensor in results]
        fills_resized = func._overloadpacket == COPY_OUT
        if fills_resized:
            self._storages.see_resized(kwargs["out"])
        if self._breakdown is not None:
            if not self._in_comm:
                self._note_compute(func, args, kwargs or {}, out, results)
            if fills_resized or any(are_new) or self._peak is None:  # nothing else makes memory grow
                self._note_peak()
        return out

    def _note_compute(self, func: Any, args: Any, kwargs: Any, out: Any, results: list[Tensor]) -> None:
        if (where := self._where()) != self._span:
            self._close_span()
            self._span = where
        flops, bytes_touched = work_of(func, args, kwargs, out, results)
        self._flops += flops
        self._bytes_touched += bytes_touched

    def _where(self) -> tuple[str, Phase]:
        if self._optimizing is not None:
            return self._optimizing, "optimizer"
        if torch._C._current_graph_task_id() == -1:
            return self._stack[-1], "forward"
        # Only activation checkpointing turns gradients on inside a backward.
        return self._backward_unit, "recompute" if torch.is_grad_enabled() else "backward"

    def _enter_backward(self, unit: str) -> None:
        self._backward_unit = unit

    def _leave_backward(self, unit: str) -> None:
        if self._backward_unit == unit:  # or the unit before it has been entered, on the same tensor
            self._backward_unit = ROOT

    def _close_span(self) -> None:
        if self._flops or self._bytes_touched:
            self._append(Compute(*self._span, self._flops, self._bytes_touched))
        self._flops = self._bytes_touched = 0

    def _append(self, event: Event) -> None:
        if self._breakdown is None:
            return
        self._note_peak()
        assert self._peak is not None
        self._recorded.append((event, self._peak))
        self._peak, self._peak_bytes = None, -1

    def _note_peak(self) -> None:
        assert self._breakdown is not None
        if (now := self._storages.nbytes) > self._peak_bytes:
            self._peak, self._peak_bytes = self._breakdown(), now


class RecordedComm:
    """One of a unit's comms, with a bracket around it that tells the recorder what each call has sent. To
    FSDP2 it is a comm like any other."""

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
        before = self._ledger.copy()

        def event() -> Event:
            sent = self._ledger.since(before)
            return self._kind(self._unit, self._shard_group.hops_of(sent, gathered_over=group.size()))

        with self._recorder.comm(event):
            return self._comm(output_tensor, input_tensor, group, *args, **kwargs)


def _differentiable(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]
