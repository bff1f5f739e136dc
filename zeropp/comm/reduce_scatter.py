"""The gradients' collective: the mirror image of the weights' one.

    full gradients [W, S] --encode, rows by column--> [n, N, E1]
      hop 1, in-node:  all-to-all over the n ranks of the node ---> [n senders, N, E1]
    decode, sum over senders in fp32 --> node slice [N, S] --encode--> [N, E2]
      hop 2, across:   all-to-all over the N ranks of the column -> [N senders, 1, E2]
    decode, sum over senders in fp32 --> shard [1, S]

Each value is encoded twice at most, whatever the number of ranks, and every sum is in fp32. On one node, or
with one rank a node, or on the flat route, there is one hop.

[Note: Accumulation]
With cross-node sync off, hop 2 is left out: the node slice adds up in fp32 (`pending`), and FSDP2 gets zeros
to add to the sharded gradient. The next reduction with sync on sends the sum. `pending` is a part of `.grad`
that has not arrived yet, and is dropped when `.grad` is (zero_grad sets it to None). All micro-batches must
have one buffer layout; the adapter sees to it that parameters without a gradient are sent as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.profiler import record_function

from ..config import CodecName, Config
from ..quant import QUANTIZABLE_DTYPES, BlockCodec, Codec, make_codec
from ..topology import Hop, HopName
from .pipeline import column_chunks, run_pipelined
from .wire import Wire


class ReduceScatter:
    """Takes the place of FSDP2's reduce-scatter in one unit."""

    def __init__(
        self,
        wire: Wire,
        hops: tuple[Hop, ...],
        config: Config,
        gradients_dropped: Callable[[], bool],
    ) -> None:
        self.wire = wire
        self.hops = hops
        """(in-node, across), or the only one."""
        self.codec_names: dict[HopName, CodecName] = {
            "in-node": config.gradients_in_node,
            "across": config.gradients_across,
            "flat": config.gradients_across,  # Config makes sure that both are the same
        }
        self.block_size = config.block_size
        self.sync_across = True
        self.pending: Tensor | None = None
        """See [Note: Accumulation]. fp32 [N, S]."""
        self._gradients_dropped = gradients_dropped
        self._row_order = wire.topology.row_order if len(hops) == 2 else None

    @property
    def can_defer(self) -> bool:
        """Whether cross-node sync can be put off: there is an across hop, and it comes last."""
        return self.hops[-1].name == "across"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        world_size, dtype = self.wire.topology.size, input_tensor.dtype
        self.wire.count_baseline("reduce_scatter", output_tensor.numel())
        flat_as_it_is = self.hops[0].name == "flat" and self.codec_names["flat"] == "none"
        if flat_as_it_is or dtype not in QUANTIZABLE_DTYPES:
            return self._as_it_is(output_tensor, input_tensor, group, op, async_op)
        if output_tensor.numel() == 0:
            return None

        rows, out = input_tensor.view(world_size, -1), output_tensor.view(1, -1)
        pending, factor = self._pending_for(rows), scale_of(op, world_size)

        def reduce(number: int, columns: slice) -> Generator[None]:
            node_slice = None if pending is None else pending[:, columns]
            return self._reduce(number, rows[:, columns], out[:, columns], node_slice, factor, group)

        run_pipelined(reduce(*chunk) for chunk in enumerate(column_chunks(rows.shape[1], self.block_size)))
        if pending is not None and not self.sync_across:
            output_tensor.zero_()
            self.pending = pending
        else:
            self.pending = None
        return None

    def _pending_for(self, rows: Tensor) -> Tensor | None:
        """The node slice [N, S] to add this micro-batch to, or None if there is nothing to put off.

        `.grad` being None, and sync being on, are decided by the training loop, on all ranks alike.
        """
        pending = self.pending
        if pending is not None and self._gradients_dropped():
            pending = None
        if not self.can_defer or (pending is None and self.sync_across):
            return None
        shape = (self.hops[-1].size, rows.shape[1])
        if pending is None:
            return torch.zeros(shape, dtype=torch.float32, device=rows.device)
        if pending.shape != shape:
            raise RuntimeError(
                f"unit '{self.wire.unit}' reduces {shape[1]} elements per rank in this micro-batch and "
                f"{pending.shape[1]} in those before it; while gradients accumulate without cross-node sync, "
                "requires_grad of its parameters must not change"
            )
        return pending

    def _reduce(
        self,
        chunk: int,
        rows: Tensor,
        out: Tensor,
        pending: Tensor | None,
        factor: float,
        group: ProcessGroup,
    ) -> Generator[None]:
        """Reduce one chunk: rows [W, S] -> out [1, S], or -> pending [N, S] while sync is off."""
        *before, last = self.hops
        if pending is not None:
            if before:
                received, codec = yield from self._exchange(chunk, before[0], rows, self._row_order, group)
                self._decode_sum(codec, received, pending, factor, accumulate=True)
            else:  # one rank a node: its own gradients are the node slice
                pending.add_(rows, alpha=factor)
            if not self.sync_across:
                return
            received, codec = yield from self._exchange(chunk, last, pending, None, group)
            factor = 1.0
        elif before:
            arrived, codec = yield from self._exchange(chunk, before[0], rows, self._row_order, group)
            received, codec = yield from self._exchange_sums(
                chunk, last, arrived, codec, rows.shape[1], factor, group
            )
            factor = 1.0
        else:
            received, codec = yield from self._exchange(chunk, last, rows, None, group)
        self._decode_sum(codec, received, out, factor)

    def _exchange(
        self, chunk: int, hop: Hop, rows: Tensor, order: Sequence[int] | None, group: ProcessGroup
    ) -> Generator[None, None, tuple[Tensor, Codec]]:
        """Encode rows [m * R, S] and swap them over the hop's m ranks: received [m, R, E], and its codec."""
        codec = make_codec(self.codec_names[hop.name], rows.dtype, self.block_size)
        shape = (hop.size, rows.shape[0] // hop.size, codec.row_bytes(rows.shape[1]))
        sent, received = self._buffers(chunk, hop, shape, rows.device)
        with record_function(f"zeropp::reduce_scatter.encode ({self.wire.unit})"):
            codec.encode(rows, sent.view(rows.shape[0], -1), order)
        yield from self.wire.all_to_all(hop, group, sent, received)
        return received, codec

    def _exchange_sums(
        self,
        chunk: int,
        hop: Hop,
        arrived: Tensor,
        arrived_codec: Codec,
        numel: int,
        factor: float,
        group: ProcessGroup,
    ) -> Generator[None, None, tuple[Tensor, Codec]]:
        """The same for the sums over senders of what arrived [n, N, E1]: decode, sum, encode, swap."""
        codec = make_codec(self.codec_names[hop.name], torch.float32, self.block_size)
        sent, received = self._buffers(chunk, hop, (hop.size, 1, codec.row_bytes(numel)), arrived.device)
        with record_function(f"zeropp::reduce_scatter.recode ({self.wire.unit})"):
            encoded = sent.view(hop.size, -1)
            if isinstance(arrived_codec, BlockCodec) and isinstance(codec, BlockCodec):
                arrived_codec.recode(arrived, codec, encoded, numel, factor)
            else:
                node_slice = self.wire.scratch.take(
                    "reduce_scatter.node_slice", hop.size, numel, dtype=torch.float32, device=arrived.device
                )
                arrived_codec.decode_sum(arrived, node_slice, factor)
                codec.encode(node_slice, encoded)
        yield from self.wire.all_to_all(hop, group, sent, received)
        return received, codec

    def _decode_sum(
        self, codec: Codec, received: Tensor, out: Tensor, factor: float, accumulate: bool = False
    ) -> None:
        with record_function(f"zeropp::reduce_scatter.decode ({self.wire.unit})"):
            codec.decode_sum(received, out, factor, accumulate)

    def _buffers(
        self, chunk: int, hop: Hop, shape: tuple[int, int, int], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        take, tag = self.wire.scratch.take, f"reduce_scatter.{hop.name}.{chunk}"
        return take(f"{tag}.sent", *shape, device=device), take(f"{tag}.received", *shape, device=device)

    def _as_it_is(
        self,
        output: Tensor,
        gradients: Tensor,
        group: ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool,
    ) -> dist.Work | None:
        """The backend's own reduce-scatter, counted as the ring that it should be (gloo sends twice that)."""
        self.wire.count_ring("reduce_scatter", "flat", group, output.numel() * output.itemsize)
        work: dist.Work | None = dist.reduce_scatter_single(
            output, gradients, op=op, group=group, async_op=async_op
        )
        return work


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
