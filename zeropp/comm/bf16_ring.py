"""The ring that reduces gradients as bf16: what FSDP2 with a 16-bit wire sends on NCCL.

The partial sum of a row starts behind the row's owner and goes once around the ring, up to the owner. In
every step each rank passes one partial sum on to its successor, W - 1 times in all; the row of r3, W = 4:

    r0 --x0--> r1 --x0 + x1--> r2 --x0 + x1 + x2--> r3

The ring goes node by node (`Topology.ring`), so W - 1 rows leave each node: no ring can do with fewer.

[Note: Sums as NCCL makes them]
NCCL sums in the dtype that it sends: a bf16 element that arrives and the rank's own are added in fp32, and
rounded to bf16 at each hop. The factor of AVG (1 / W) and PREMUL_SUM is rounded to bf16, too, and multiplies
each rank's own elements before they are added (src/enqueue.cc and src/device/reduce_kernel.h of NCCL 2:
ncclAvg of floats is ncclDevPreMulSum). With 3 ranks, that makes a mean 0.2% too large. It is the same here,
so that the 16-bit baseline is the one that a user has, on CPU as well. On other devices it is the backend's
own reduce-scatter of bf16.
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
CHUNK_MULTIPLE = 16  # elements; there are no blocks to respect, and any number gives the same sums


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
        """Describe a reduction: `op` is FSDP2's operation, and `factor` the factor that it has."""
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

        Every rank sends and receives the messages of a chunk in one order: the k-th is the same for both
        ends.
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
            with label("encode"):
                self._contribute(rows[ring[place - distance]], own)
            yield
            with label("flat"):
                for message in messages:
                    if message is not None:
                        self._hop.wait_for(message)
            with label("decode"):
                arriving.add_(own)  # [Note: Sums as NCCL makes them]
            held, arriving = arriving, held
        with label("decode"):
            out.copy_(held)
        wire.count_flat_ring("reduce_scatter", held.numel() * WIRE_DTYPE.itemsize)
        _count_work(wire, rows, out)

    def _contribute(self, row: Tensor, into: Tensor) -> None:
        into.copy_(row)
        if self._scale is not None:
            into.mul_(self._scale)


def _count_work(wire: Wire, rows: Tensor, out: Tensor) -> None:
    """All rows became bf16 once; the own one came back."""
    record = wire.ledger.record_work
    record(WorkKey(wire.unit, "reduce_scatter", "flat", "encode", "bf16"), rows.numel())
    record(WorkKey(wire.unit, "reduce_scatter", "flat", "decode", "bf16"), out.numel())
