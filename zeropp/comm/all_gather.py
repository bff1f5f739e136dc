"""The weights' collective: encode, gather across nodes, keep, gather inside the node, decode.

    shard [S] --encode--> [1, E]
      hop A, across:      [1, E] --all-gather over the N ranks of the column--> node shard [N, E]
      hop B, in-node:  [N, E] --all-gather over the n ranks of the node------> [n, N, E]
    [n, N, E] --decode, row (l, i) to the slot of its rank--> full [W, S]

E is the row in wire bytes: payload and scales in one. The node shard is what hpZ calls the secondary
partition: while it is fresh, a gather is hop B alone, and decodes the very same bytes. On one node, or with
one rank a node, or on the flat route, there is one hop.

[Note: Own slot]
FSDP2 passes `input_tensor` as a view into `output_tensor`. The rank's own slot is overwritten with the
decoded values like any other: all ranks must compute with the same weights. So whatever needs the shard
itself must come before the first chunk is decoded.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from ..config import CodecName, Config
from ..quant import CastCodec, Codec, make_codec
from ..topology import Hop
from .node_shard import NodeShard, fingerprint
from .pipeline import column_chunks, run_pipelined
from .wire import Wire


class AllGather:
    """Takes the place of FSDP2's all-gather in one unit."""

    def __init__(self, wire: Wire, hops: tuple[Hop, ...], config: Config) -> None:
        self.wire = wire
        self.codec_name: CodecName = config.weights
        self.block_size = config.block_size
        self.hops = hops
        """(across, in-node), or the only one."""
        self.node_shard = NodeShard(wire.unit) if config.secondary and hops[0].name == "across" else None
        self.owner: Any = None
        """Whoever installed this comm; keeps it alive with the model."""
        self._row_order = wire.topology.row_order if len(hops) == 2 else None

    def invalidate(self) -> None:
        """The weights changed: the next gather starts from the shard."""
        if self.node_shard is not None:
            self.node_shard.invalidate()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        world_size, device = self.wire.topology.size, input_tensor.device
        if group.size() != world_size:
            # reshard_after_forward=int: FSDP2 gathers weights that it already has, decoded, on fewer ranks.
            return self._as_it_is(output_tensor, input_tensor, group, async_op, "post-forward")
        self.wire.count_baseline("all_gather", input_tensor.numel())
        codec = make_codec(self.codec_name, input_tensor.dtype, self.block_size)
        if self.hops[0].name == "flat" and _keeps(codec, input_tensor.dtype):
            return self._as_it_is(output_tensor, input_tensor, group, async_op, "flat")
        if input_tensor.numel() == 0:
            return None

        out, kept = output_tensor.view(world_size, -1), self.node_shard
        with nullcontext() if kept is None else kept.in_use(device):
            reuse = kept is not None and kept.fresh  # the same on every rank: [Note: Freshness]
            if kept is not None and reuse:
                kept.check(input_tensor)
            # Taken now: see [Note: Own slot]
            source = fingerprint(input_tensor) if kept is not None and not reuse else None
            run_pipelined(
                self._gather(number, input_tensor[columns], out[:, columns], codec, reuse, group)
                for number, columns in enumerate(column_chunks(input_tensor.numel(), self.block_size))
            )
            if kept is not None and source is not None:
                kept.filled_from(source)
        return None

    def _gather(
        self, chunk: int, shard: Tensor, out: Tensor, codec: Codec, reuse: bool, group: ProcessGroup
    ) -> Generator[None]:
        """Gather one chunk: shard [S] of this rank -> out [W, S]."""
        unit, device, first = self.wire.unit, shard.device, self.hops[0]
        row_bytes = codec.row_bytes(shard.numel())
        if self.node_shard is not None:
            encoded = self.node_shard.buffer(chunk, first.size, row_bytes, device)  # [N, E]
        else:
            encoded = self._scratch(f"encoded.{chunk}", first.size, row_bytes, device)
        if not reuse:
            own = encoded[(first.group or group).rank()]
            with record_function(f"zeropp::all_gather.encode ({unit})"):
                codec.encode(shard.view(1, -1), own.view(1, -1))
            yield from self.wire.all_gather(first, group, encoded)
        if len(self.hops) == 2:
            second = self.hops[1]
            by_local = self._scratch(f"gathered.{chunk}", out.shape[0], row_bytes, device)
            by_local = by_local.view(second.size, first.size, row_bytes)
            by_local[(second.group or group).rank()].copy_(encoded)
            yield from self.wire.all_gather(second, group, by_local)
            gathered = by_local.view(out.shape[0], row_bytes)
        else:
            gathered = encoded
        with record_function(f"zeropp::all_gather.decode ({unit})"):
            codec.decode(gathered, out, self._row_order)

    def _as_it_is(
        self, output: Tensor, shard: Tensor, group: ProcessGroup, async_op: bool, hop_name: str
    ) -> dist.Work | None:
        """FSDP2's own all-gather, counted."""
        self.wire.count_ring("all_gather", hop_name, group, shard.numel() * shard.itemsize)
        work: dist.Work | None = dist.all_gather_single(output, shard, group=group, async_op=async_op)
        return work

    def _scratch(self, tag: str, rows: int, row_bytes: int, device: torch.device) -> Tensor:
        return self.wire.scratch.take(f"all_gather.{tag}", rows, row_bytes, device=device)


def _keeps(codec: Codec, dtype: torch.dtype) -> bool:
    return isinstance(codec, CastCodec) and codec.wire_dtype == dtype
