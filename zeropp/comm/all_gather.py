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
decoded values like any other: all ranks must compute with the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from ..config import CodecName, Config
from ..quant import CastCodec, Codec, make_codec
from ..topology import Hop
from .node_shard import NodeShard
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
        world_size = self.wire.topology.size
        if group.size() != world_size:
            # reshard_after_forward=int: FSDP2 gathers weights that it already has, decoded, on fewer ranks.
            return self._as_it_is(output_tensor, input_tensor, group, async_op, "post-forward")
        self.wire.count_baseline("all_gather", input_tensor.numel())
        codec = make_codec(self.codec_name, input_tensor.dtype, self.block_size)
        if self.hops[0].name == "flat" and _keeps(codec, input_tensor.dtype):
            return self._as_it_is(output_tensor, input_tensor, group, async_op, "flat")
        if input_tensor.numel() == 0:
            return None

        encoded = self._first_hop(input_tensor, codec, group)  # [N, E], or [W, E] if it is the only hop
        if len(self.hops) == 2:
            row_bytes = encoded.shape[1]
            gathered = self._scratch("gathered", world_size, row_bytes, input_tensor.device)
            self.wire.all_gather(self.hops[1], group, encoded, gathered)  # [n, N, E]
        else:
            gathered = encoded
        with record_function(f"zeropp::all_gather.decode ({self.wire.unit})"):
            # See [Note: Own slot]
            codec.decode(gathered, output_tensor.view(world_size, -1), self._row_order)
        if self.node_shard is not None:
            self.node_shard.used()
        return None

    def _first_hop(self, shard: Tensor, codec: Codec, group: ProcessGroup) -> Tensor:
        """Encode and run the first hop, or take its result from the node shard."""
        hop, row_bytes, kept = self.hops[0], codec.row_bytes(shard.numel()), self.node_shard
        if kept is None:
            encoded = self._scratch("encoded", hop.size, row_bytes, shard.device)
        else:
            encoded = kept.buffer(hop.size, row_bytes, shard.device)
            if kept.fresh:  # the same on every rank: [Note: Freshness]
                kept.check(shard)
                return encoded
        piece = self._scratch("piece", 1, row_bytes, shard.device)
        with record_function(f"zeropp::all_gather.encode ({self.wire.unit})"):
            codec.encode(shard.view(1, -1), piece)
        self.wire.all_gather(hop, group, piece, encoded)
        if kept is not None:
            kept.filled_from(shard)
        return encoded

    def _as_it_is(
        self, output: Tensor, shard: Tensor, group: ProcessGroup, async_op: bool, hop_name: str
    ) -> dist.Work | None:
        """FSDP2's own all-gather, counted."""
        self.wire.count_ring("all_gather", hop_name, group.size(), shard.numel() * shard.itemsize)
        work: dist.Work | None = dist.all_gather_single(output, shard, group=group, async_op=async_op)
        return work

    def _scratch(self, tag: str, rows: int, row_bytes: int, device: torch.device) -> Tensor:
        return self.wire.scratch.take(f"all_gather.{tag}", rows, row_bytes, device=device)


def _keeps(codec: Codec, dtype: torch.dtype) -> bool:
    return isinstance(codec, CastCodec) and codec.wire_dtype == dtype
