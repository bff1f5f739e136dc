"""The weights' collective: encode, gather across nodes, keep, gather inside the node, decode.

    shard [S] --encode--> [1, E]
      hop A, across:      [1, E] --all-gather over the N ranks of the column--> node shard [N, E]
      hop B, in-node:  [N, E] --all-gather over the n ranks of the node------> [n, N, E]
    [n, N, E] --decode, row (l, i) to the slot of its rank--> full [W, S]

E is the row in wire bytes: payload and scales in one. The node shard is what hpZ calls the secondary
partition: while it is fresh, a gather is hop B alone, and decodes the very same bytes. On one node, or with
one rank a node, or on the flat route, there is one hop.

With weights="delta-int4" the node shard is in 16 bits, hop A brings it up to date by differences (see
differences.py), and hop B sends it as `delta_in_node` says.

[Note: Own slot]
FSDP2 passes `input_tensor` as a view into `output_tensor`. The rank's own slot is overwritten with the
decoded values like any other: all ranks must compute with the same weights. So whatever needs the shard
itself must come before the first chunk is decoded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from ..config import CodecName, Config
from ..labels import Label
from ..quant import QUANTIZABLE_DTYPES, CastCodec, Codec, make_codec
from ..topology import Hop
from .capture import refuse_capture
from .chunks import Columns, column_chunks
from .differences import Differences
from .node_shard import NodeShard, fingerprint
from .pipeline import run_pipelined
from .wire import Wire

logger = logging.getLogger("zeropp")

WEIGHTS_FIELDS = (
    "weights",
    "secondary",
    "delta_in_node",
    "refresh_every",
    "block_size",
    "chunks",
    "route",
    "node_size",
)
"""Of Config: what decides on the bytes of a node shard."""


class AllGather:
    """Takes the place of FSDP2's all-gather in one unit."""

    def __init__(
        self, wire: Wire, hops: tuple[Hop, ...], config: Config, parameters: Sequence[int] = ()
    ) -> None:
        self.wire = wire
        self.parameters = tuple(parameters)
        """Elements of each in a shard, in its order."""
        self.config = config
        self.hops = hops
        """(across, in-node), or the only one."""
        keeps = config.secondary and hops[0].name == "across"
        self.node_shard = NodeShard(wire.unit) if keeps else None
        self.differences: Differences | None = None
        if keeps and config.weights == "delta-int4":
            self.differences = Differences(wire, hops[0], config.block_size, config.refresh_every)
        self.owner: Any = None
        """Whoever installed this comm; keeps it alive with the model."""
        self._row_order = wire.topology.row_order if len(hops) == 2 else None
        self._member = 0
        """This rank's place among those of the first hop."""
        self._restored: dict[int, Tensor] = {}
        """Own rows of the node shard from a checkpoint, until they are in place."""

    def codec_name(self, hop: Hop) -> str:
        """What the hop sends, in the words of `Config`."""
        is_delta = self.config.weights == "delta-int4"
        return self.config.delta_in_node if is_delta and hop.name == "in-node" else self.config.weights

    def after_step(self) -> None:
        """An optimizer changed the weights: the next gather starts from the shard."""
        if self.node_shard is not None:
            self.node_shard.invalidate()

    def invalidate(self) -> None:
        """The weights are others now: the next gather starts from the shard, and sends all of it."""
        self.after_step()
        self._restored = {}
        if self.differences is not None:
            self.differences.has_reference = False

    def release(self) -> None:
        """Give up the node shard, and with it the reference of differences."""
        self.invalidate()
        if self.node_shard is not None:
            self.node_shard.release()

    def node_shard_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """What the node shard takes once it is filled, from shards of `numel` elements."""
        if self.node_shard is None:
            return 0
        codec = self._kept_codec(dtype)
        return sum(math.prod(self._encoded_shape(codec, columns)) for columns in self._chunks(numel))

    def take_over(self, other: AllGather) -> None:
        """Go on with what `other` has kept, if it means the same under this Config."""
        if all(getattr(self.config, name) == getattr(other.config, name) for name in WEIGHTS_FIELDS):
            self.node_shard, self.differences = other.node_shard, other.differences
            self._member, self._restored = other._member, other._restored

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on as if it had not stopped. Only differences have a history."""
        if self.differences is None or self.node_shard is None or not self.differences.has_reference:
            return {}
        kept = self.node_shard.state_dict(row=self._member)
        if self._restored:  # and not in place yet
            kept["rows"] = [row.clone() for _, row in sorted(self._restored.items())]
        return {"node_shard": kept, "differences": self.differences.sent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. The next gather first gives the own row of the reference to the other nodes."""
        self.invalidate()
        if state and self.differences is None:
            logger.warning(
                "zeropp: unit %s: the saved reference of differences is not used: this Config sends none",
                self.wire.unit,
            )
        if state and self.differences is not None and self.node_shard is not None:
            self._restored = self.node_shard.load_state_dict(state["node_shard"])
            self.differences.sent, self.differences.has_reference = int(state["differences"]), True

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
        codec = self._kept_codec(input_tensor.dtype)
        if self.hops[0].name == "flat" and _keeps(codec, input_tensor.dtype):
            return self._as_it_is(output_tensor, input_tensor, group, async_op, "flat")
        if input_tensor.numel() == 0:
            return None
        refuse_capture(self.wire.unit, device)

        out, kept = output_tensor.view(world_size, -1), self.node_shard
        self._member = (self.hops[0].group or group).rank()
        with nullcontext() if kept is None else kept.in_use(device):
            reuse = kept is not None and kept.fresh  # the same on every rank: [Note: Freshness]
            if kept is not None and reuse:
                kept.check(input_tensor)
            # Taken now: see [Note: Own slot]
            source = fingerprint(input_tensor) if kept is not None and not reuse else None
            chunks = self._chunks(input_tensor.numel())
            if self._restored:
                self._raise_unless_restored_fits(chunks, codec)
            run_pipelined(
                self._gather(number, columns, input_tensor, out, codec, reuse, group)
                for number, columns in enumerate(chunks)
            )
            self._restored = {}
            if kept is not None and source is not None:
                kept.filled_from(source)
                if self.differences is not None:
                    self.differences.count_send()
        return None

    def _gather(
        self,
        chunk: int,
        columns: Columns,
        shard: Tensor,
        out: Tensor,
        codec: Codec,
        reuse: bool,
        group: ProcessGroup,
    ) -> Generator[None]:
        """Gather one chunk: its columns of this rank's shard [S] -> those of out [W, S]."""
        unit, device, first = self.wire.unit, shard.device, self.hops[0]
        shard, out = shard[columns.at], out[:, columns.at]
        shape = self._encoded_shape(codec, columns)
        codec = codec.with_block_starts(columns.block_starts)
        if self.node_shard is not None:
            encoded = self.node_shard.buffer(chunk, *shape, device)  # [N, E]
        else:
            encoded = self._scratch(f"encoded.{chunk}", *shape, device)
        if chunk in self._restored:
            encoded[self._member].copy_(self._restored[chunk])
            yield from self.wire.all_gather(first, group, encoded)
        if reuse:
            pass
        elif self.differences is not None and self.differences.are_next and _is_float(shard):
            yield from self.differences.send(chunk, shard, encoded, codec, group, columns.block_starts)
        else:
            with record_function(str(Label("all_gather", "encode", unit))):
                codec.encode(shard.view(1, -1), encoded[self._member].view(1, -1))
            yield from self.wire.all_gather(first, group, encoded)
        if len(self.hops) == 2:
            encoded, codec = self._for_node(chunk, columns, encoded, codec, shard)
            gathered = yield from self._gather_in_node(chunk, encoded, group)
        else:
            gathered = encoded
        with record_function(str(Label("all_gather", "decode", unit))):
            codec.decode(gathered, out, self._row_order)

    def _chunks(self, numel: int) -> list[Columns]:
        return column_chunks(numel, self.config.block_size, self.parameters, most=self.config.chunks)

    def _raise_unless_restored_fits(self, chunks: list[Columns], codec: Codec) -> None:
        """Before the first message, and on every rank alike: all have rows of the same length."""
        needed = [codec.with_block_starts(c.block_starts).row_bytes(c.at.stop - c.at.start) for c in chunks]
        saved = [row.numel() for _, row in sorted(self._restored.items())]
        if saved != needed:
            raise RuntimeError(
                f"the loaded state of unit '{self.wire.unit}' has a reference of {saved} bytes by chunk, and "
                f"this run needs {needed}: load a state of the same model and Config, or call invalidate() "
                "on every rank to go on without it"
            )

    def _for_node(
        self, chunk: int, columns: Columns, kept: Tensor, codec: Codec, shard: Tensor
    ) -> tuple[Tensor, Codec]:
        """What hop B sends, and its codec: the node shard as it is; with differences, encoded once more."""
        if self.differences is None or self.config.delta_in_node == "bf16" or not _is_float(shard):
            return kept, codec
        in_node = make_codec(self.config.delta_in_node, shard.dtype, self.config.block_size)
        in_node = in_node.with_block_starts(columns.block_starts)
        size, device = (len(kept), shard.numel()), shard.device
        with record_function(str(Label("all_gather", "encode", self.wire.unit))):
            take = self.wire.scratch.take
            values = take("all_gather.reference", *size, dtype=torch.float32, device=device)
            codec.decode(kept, values)
            encoded = self._scratch(f"for_node.{chunk}", len(kept), in_node.row_bytes(shard.numel()), device)
            in_node.encode(values, encoded)
        return encoded, in_node

    def _gather_in_node(
        self, chunk: int, encoded: Tensor, group: ProcessGroup
    ) -> Generator[None, None, Tensor]:
        """Hop B: encoded [N, E] of every rank of the node -> [W, E]."""
        hop, (nodes, row_bytes) = self.hops[1], encoded.shape
        gathered = self._scratch(f"gathered.{chunk}", hop.size * nodes, row_bytes, encoded.device)
        by_local = gathered.view(hop.size, nodes, row_bytes)
        by_local[(hop.group or group).rank()].copy_(encoded)
        yield from self.wire.all_gather(hop, group, by_local)
        return gathered

    def _encoded_shape(self, codec: Codec, columns: Columns) -> tuple[int, int]:
        """[N, E]: of a chunk, as the first hop leaves it."""
        numel = columns.at.stop - columns.at.start
        return self.hops[0].size, codec.with_block_starts(columns.block_starts).row_bytes(numel)

    def _kept_codec(self, dtype: torch.dtype) -> Codec:
        """Of the node shard; without one, of the only hop."""
        name: CodecName
        if self.differences is not None:
            name = "none" if dtype.itemsize == 2 else "bf16"
        elif self.config.weights == "delta-int4":  # one node: there is no hop for differences
            name = self.config.delta_in_node
        else:
            name = self.config.weights
        return make_codec(name, dtype, self.config.block_size)

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


def _is_float(shard: Tensor) -> bool:
    """Not the raw bytes of a unit with several dtypes."""
    return shard.dtype in QUANTIZABLE_DTYPES
