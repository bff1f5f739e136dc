"""What a reduction is given, and what it hears from outside: FSDP2's operation, what became of `.grad`,
whether it may be late."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol
from zlib import crc32

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from .layout import ReduceChunk


@dataclass
class Chunk:
    """Some columns of one reduction, [Note: Chunks] in chunks.py."""

    layout: ReduceChunk
    rows: Tensor | None
    """The full gradients [W, S], until they are encoded: then their memory may go."""
    out: Tensor
    """The reduced shard [1, S]."""
    pending: Tensor | None
    """The node slice [N, S] to add to; see [Note: Accumulation]."""
    factor: float
    """What the sum over all ranks is multiplied by."""
    group: ProcessGroup
    goes_across: bool
    """False: only as far as the node slice."""
    slot: int
    """For buffers: see `Job` in cpu/comm_threads.py."""

    @property
    def key(self) -> str:
        """Name of buffers that no other chunk uses meanwhile."""
        return f"{self.slot}.{self.layout.number}"

    def take_rows(self) -> Tensor:
        rows, self.rows = self.rows, None
        assert rows is not None
        return rows


class Gradients(Protocol):
    """What became of the `.grad` that `pending` is a part of: told when it is, asked before it grows."""

    def deferred(self) -> None: ...

    def raise_if_gone(self) -> None: ...


class Overlapping(Protocol):
    """Lets reductions go on while FSDP2 does: see cpu/overlap.py."""

    def late_place(self, output: Tensor) -> Tensor | None: ...

    def expect(self, work: dist.Work, gradients: Tensor, reduced: Tensor, output: Tensor) -> None: ...


def scale_of(op: ReduceOp | ReduceOp.RedOpType, world_size: int) -> float:
    """What the sum over all ranks is multiplied by.

    >>> scale_of(ReduceOp.AVG, 4), scale_of(ReduceOp.SUM, 4), scale_of(ReduceOp.PREMUL_SUM(0.5), 4)
    (0.25, 1.0, 0.5)
    """
    kind = getattr(op, "op", op)  # ReduceOp.AVG is a RedOpType, PREMUL_SUM(f) a ReduceOp with a factor
    if kind == ReduceOp.AVG:
        return 1.0 / world_size
    if kind == ReduceOp.SUM:
        return 1.0
    if isinstance(op, ReduceOp) and kind == ReduceOp.PREMUL_SUM:
        return float(op.factor)
    raise ValueError(f"cannot reduce gradients with {op}; FSDP2 uses AVG, SUM or PREMUL_SUM")


@cache
def noise_key(seed: int, where: str, position: int) -> int:
    """Upper half of the seeds of rounding at random on a hop, for the rank at `position` of the shard group.

    Nothing else that differs between shard groups is in it: equal gradients of a parameter are rounded alike
    in all of them. See [Note: Segments] in chunks.py.
    """
    return crc32(f"{seed}/{where}/{position}".encode()) << 32


def is_last_operation(op: ReduceOp | ReduceOp.RedOpType) -> bool:
    """Whether FSDP2 takes the result as it is: it divides only after plain sums."""
    return bool(getattr(op, "op", op) != ReduceOp.SUM)
