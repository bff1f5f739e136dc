"""Work of a torch operation: FLOPs, or the bytes that it reads and writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from ...fsdp2.units import gather_copies

aten = torch.ops.aten
FLOPS = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
UNTOUCHED = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
}
COPY_IN, _ = gather_copies()


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums up the work of all operations that run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.bytes_touched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = [tensor for tensor in tree_iter(out) if isinstance(tensor, Tensor)]
        flops, bytes_touched = work_of(func, args, kwargs or {}, out, results)
        self.flops += flops
        self.bytes_touched += bytes_touched
        return out


def work_of(func: Any, args: Any, kwargs: Any, out: Any, results: list[Tensor]) -> tuple[int, int]:
    """Return the FLOPs of a matrix product, or the bytes that any other operation touches."""
    packet = func._overloadpacket
    if packet in FLOPS:
        return FLOPS[packet](*args, **kwargs, out_val=out), 0
    if func.is_view or packet in UNTOUCHED or func.namespace == "prim":
        return 0, 0
    return 0, _bytes_touched(packet, args, kwargs, results)


def _bytes_touched(packet: Any, args: Any, kwargs: Any, results: list[Tensor]) -> int:
    """Return the bytes that an operation reads and writes: those of its tensors, with two exceptions."""
    if packet == COPY_IN:  # copies shards into their part of a large buffer
        return sum(2 * int(shard.nbytes) for shard in args[0])
    if packet == aten.embedding:  # reads some rows of a table
        return 2 * sum(tensor.nbytes for tensor in results)
    given = [tensor for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)]
    return sum(tensor.nbytes for tensor in (*given, *results))
