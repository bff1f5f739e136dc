"""A ring that reduces gradients in bf16, with the bytes and sums of FSDP2 with a 16-bit wire on NCCL.

The partial sum of a row starts at the successor of the row's owner and goes once around the ring to the
owner. In each of W - 1 steps, every rank sends one partial sum to its successor. The row of r3 with W = 4:

    r0 --x0--> r1 --x0 + x1--> r2 --x0 + x1 + x2--> r3

The ring goes node by node (`Topology.ring`), so W - 1 rows leave each node, the fewest of any ring.

[Note: Sums as NCCL makes them]
NCCL sums in the dtype that it sends. It adds the received bf16 element and the rank's own in fp32, and rounds
the sum to bf16 at each hop. The factor of AVG (1 / W) and PREMUL_SUM is rounded to bf16, too, and multiplies
each rank's own elements before the addition (src/enqueue.cc and src/device/reduce_kernel.h of NCCL 2: ncclAvg
of floats is ncclDevPreMulSum). With 3 ranks, this makes a mean 0.2% too large. This ring computes the same,
so that the 16-bit baseline on CPU is the baseline that a user has. On other devices, the backend's own
reduce-scatter of bf16 runs.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ..quant import Segment
from ..topology import Hop
from .chunks import ChunkPolicy, column_chunks
from .execution import Transfer, pipelined
from .ledger import WorkKey
from .wire import Wire

WIRE_DTYPE = torch.bfloat16
CHUNK_MULTIPLE = 16  # elements; bf16 has no blocks, so any number gives the same sums


class RingReduction(Transfer):
    """Reduces the rows [W, S] of all ranks to this rank's shard [1, S] in a ring."""

    def __init__(
        self,
        wire: Wire,
        hop: Hop,
        rows: Tensor,
        out: Tensor,
        group: ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        factor: float,
        cut: ChunkPolicy,
    ) -> None:
        """Describe a reduction: `op` is FSDP2's operation, and `factor` its factor."""
        self.unit, self.device = wire.unit, rows.device
        self._wire, self._hop, self._group, self._op = wire, hop, hop.group or group, op
        self._rows, self._out, self._cut = rows, out, cut
        self._scale = None if factor == 1.0 else torch.tensor(factor, dtype=WIRE_DTYPE)
        self._slot = 0

    def prepare(self, slot: int) -> None:
        self._slot = slot

    def steps(self) -> Generator[None]:
        rows, out = self._rows, self._out
        if self.device.type != "cpu":
            self._reduce_by_backend()
            return
        # gloo's own reduce-scatter sends twice as much, and has no PREMUL_SUM.
        columns = column_chunks(self._cut, [Segment(rows.shape[1], CHUNK_MULTIPLE)])
        yield from pipelined(
            self._pass_around(number, rows[:, part.at], out[:, part.at])
            for number, part in enumerate(columns)
        )

    def _reduce_by_backend(self) -> None:
        """Run the backend's reduce-scatter in bf16, which has the factor in its operation."""
        wire, rows, out = self._wire, self._rows, self._out
        wire.count_flat_ring("reduce_scatter", out.numel() * WIRE_DTYPE.itemsize)
        with wire.label("reduce_scatter", "encode"):
            sent = rows.to(WIRE_DTYPE)
        reduced = torch.empty_like(out, dtype=WIRE_DTYPE)
        with wire.label("reduce_scatter", "flat"):
            dist.reduce_scatter_single(reduced.view(-1), sent.view(-1), op=self._op, group=self._group)
        with wire.label("reduce_scatter", "decode"):
            out.copy_(reduced)
        _count_work(wire, rows, out)

    def _pass_around(self, number: int, rows: Tensor, out: Tensor) -> Generator[None]:
        """Reduce some columns of the rows [W, S] by messages between neighbours.

        Messages of a chunk share one tag. Both ends use them in the same order, so the k-th send meets the
        k-th receive.
        """
        wire, group, tag = self._wire, self._group, self._wire.tag(number)
        ring, label = wire.topology.ring, partial(wire.label, "reduce_scatter")
        size, place = len(ring), ring.index(wire.topology.rank)
        successor, predecessor = ring[(place + 1) % size], ring[place - 1]
        held, arriving, own = (
            wire.scratch.take(
                f"reduce_scatter.ring.{self._slot}.{number}.{name}",
                rows.shape[1],
                dtype=WIRE_DTYPE,
                device=self.device,
            )
            for name in ("held", "arriving", "own")
        )
        with label("encode"):
            self._contribute(rows[predecessor], held)
        for distance in range(2, size + 1):
            with label("flat"):
                messages = (
                    dist.irecv(arriving.view(torch.uint8), group=group, group_src=predecessor, tag=tag),
                    dist.isend(held.view(torch.uint8), group=group, group_dst=successor, tag=tag),
                )
            with label("encode"):  # while the messages are on the wire
                self._contribute(rows[ring[place - distance]], own)
            yield
            with label("flat"):
                for message in messages:
                    if message is not None:
                        self._hop.wait_for(message)
            with label("decode"):
                arriving.add_(own)  # [Note: Sums as NCCL makes them]
            held, arriving = arriving, held  # the next step sends this sum
        with label("decode"):
            out.copy_(held)
        wire.count_flat_ring("reduce_scatter", held.numel() * WIRE_DTYPE.itemsize)
        _count_work(wire, rows, out)

    def _contribute(self, row: Tensor, into: Tensor) -> None:
        """Convert this rank's own elements of a row to bf16, times the factor."""
        into.copy_(row)
        if self._scale is not None:
            into.mul_(self._scale)


def _count_work(wire: Wire, rows: Tensor, out: Tensor) -> None:
    """Count the work: every row was converted to bf16 once, and the own shard back."""
    record = wire.ledger.record_work
    record(WorkKey(wire.unit, "reduce_scatter", "flat", "encode", "bf16"), rows.numel())
    record(WorkKey(wire.unit, "reduce_scatter", "flat", "decode", "bf16"), out.numel())
