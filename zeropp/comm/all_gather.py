"""The weights' collective: encode, gather across nodes, keep, gather inside the node, decode.

    shard [S] --encode--> [1, E]
      hop A, across:      [1, E] --all-gather over the N ranks of the rail--> node shard [N, E]
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
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..config import Config
from ..topology import Hop
from .beside import StreamWork, run_beside
from .capture import refuse_capture
from .differences import send_difference
from .layout import GatherChunk, Layouts, gather_chunks, kept_codec_name
from .node_shard import NodeShard, Send, fingerprint
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
"""Fields of Config that decide on the bytes of a node shard."""


class AllGather:
    """Takes the place of FSDP2's all-gather in one unit."""

    def __init__(
        self,
        wire: Wire,
        hops: tuple[Hop, ...],
        config: Config,
        parameters: Sequence[int] = (),
        weights_version: Callable[[], object] = lambda: None,
    ) -> None:
        self.wire = wire
        self.parameters = tuple(parameters)
        """Elements of each in a shard, in its order."""
        self.config = config
        self.hops = hops
        """(across, in-node), or the only one."""
        keeps = config.secondary and hops[0].name == "across"
        self.node_shard: NodeShard | None = None
        if keeps:
            self.node_shard = NodeShard(
                wire.unit,
                takes_differences=config.weights == "delta-int4",
                refresh_every=config.refresh_every,
                weights_version=weights_version,
            )
        self.owner: Any = None
        """Whoever installed this comm; keeps it alive with the model."""
        self._beside: StreamWork | None = None
        """The last gather beside the current stream, until the next gather."""
        self._row_order = wire.topology.row_order if len(hops) == 2 else None
        self._layouts = Layouts(partial(gather_chunks, wire, hops, config, self.parameters))

    def codec_name(self, hop: Hop) -> str:
        """What the hop sends, in the words of `Config`."""
        is_delta = self.config.weights == "delta-int4"
        return self.config.delta_in_node if is_delta and hop.name == "in-node" else self.config.weights

    def belong_to(self, owner: Any) -> None:
        """Keep `owner` alive as long as the model has this comm."""
        self.owner = owner

    def after_step(self) -> None:
        """An optimizer changed the weights: the next gather starts from the shard."""
        if self.node_shard is not None:
            self.node_shard.weights_changed()

    def invalidate(self) -> None:
        """The weights are others now: the next gather starts from the shard, and sends all of it."""
        if self.node_shard is not None:
            self.node_shard.invalidate()

    def release(self) -> None:
        """Give up the node shard, and with it the reference of differences."""
        if self.node_shard is not None:
            self.node_shard.release()

    def node_shard_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """What the node shard takes once it is filled, from shards of `numel` elements."""
        if self.node_shard is None:
            return 0
        return sum(self.hops[0].size * chunk.sent.row_bytes for chunk in self._layouts.of(numel, dtype))

    def take_over(self, other: AllGather) -> None:
        """Go on with what `other` has kept, if it means the same under this Config."""
        if all(getattr(self.config, name) == getattr(other.config, name) for name in WEIGHTS_FIELDS):
            self.node_shard = other.node_shard

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on as if it had not stopped."""
        return {} if self.node_shard is None else self.node_shard.state_dict(self.wire.member(self.hops[0]))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state and (self.node_shard is None or not self.node_shard.takes_differences):
            logger.warning(
                "zeropp: unit %s: the saved reference of differences is not used: this Config sends none",
                self.wire.unit,
            )
        if self.node_shard is not None:
            self.node_shard.load_state_dict(state)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        world_size, numel, dtype = self.wire.topology.size, input_tensor.numel(), input_tensor.dtype
        if group.size() != world_size:
            # reshard_after_forward=int: FSDP2 gathers weights that it already has, decoded, on fewer ranks.
            return self._as_it_is(output_tensor, input_tensor, group, async_op, "post-forward")
        self.wire.count_baseline("all_gather", numel)
        if self._is_as_it_is(dtype):
            return self._as_it_is(output_tensor, input_tensor, group, async_op, "flat")
        if numel == 0:
            return None
        device = input_tensor.device
        refuse_capture(self.wire.unit, device)
        self.wire.alarm.raise_if_known()
        out = output_tensor.view(world_size, -1)
        if self._beside is not None:  # in case that nobody has waited for it
            self._beside.wait()
            self._beside = None
        if async_op and device.type != "cpu":
            run = partial(self._gather_all, input_tensor, out, group)
            self._beside = run_beside(device, run, (output_tensor, input_tensor))
            return self._beside
        self._gather_all(input_tensor, out, group)
        return None

    def _gather_all(self, shard: Tensor, out: Tensor, group: ProcessGroup) -> None:
        """shard [S] of every rank -> out [W, S]."""
        kept, chunks = self.node_shard, self._layouts.of(shard.numel(), shard.dtype)
        with nullcontext() if kept is None else kept.in_use(shard.device):
            if kept is not None:
                kept.notice_operations()
            send = Send.WEIGHTS if kept is None else kept.next_send
            if kept is not None and send is Send.NOTHING:
                kept.check(shard, self.wire.alarm)
            # Taken now: see [Note: Own slot]
            source = fingerprint(shard) if kept is not None and send is not Send.NOTHING else None
            if kept is not None:
                kept.raise_unless_restored_fits([chunk.sent.row_bytes for chunk in chunks])
            run_pipelined(self._gather(chunk, shard, out, send, group) for chunk in chunks)
            if kept is not None:
                kept.gathered(send, source)

    def _gather(
        self, chunk: GatherChunk, shard: Tensor, out: Tensor, send: Send, group: ProcessGroup
    ) -> Generator[None]:
        """Gather one chunk: its columns of this rank's shard [S] -> those of out [W, S]."""
        wire, first, kept = self.wire, self.hops[0], self.node_shard
        shard, out, member = shard[chunk.at], out[:, chunk.at], wire.member(first)
        size, device = (first.size, chunk.sent.row_bytes), shard.device
        restored = None
        if kept is None:
            encoded = wire.scratch.take(f"all_gather.encoded.{chunk.number}", *size, device=device)
        else:
            encoded = kept.buffer(chunk.number, *size, device)  # [N, E]
            restored = kept.restored_row(chunk.number)
        if restored is not None:
            encoded[member].copy_(restored)
            yield from wire.all_gather(first, group, encoded)
        if send is Send.DIFFERENCE and chunk.difference is not None:
            yield from send_difference(wire, first, group, chunk, shard, encoded)
        elif send is not Send.NOTHING:
            with wire.label("all_gather", "encode"):
                chunk.sent.encode(shard.view(1, -1), encoded[member : member + 1])
            yield from wire.all_gather(first, group, encoded)
        if len(self.hops) == 2:
            if chunk.encodes_for_node:
                encoded = self._encode_for_node(chunk, encoded)
            encoded = yield from self._gather_in_node(chunk, encoded, group)
        with wire.label("all_gather", "decode"):
            chunk.received.decode(encoded, out, self._row_order)

    def _encode_for_node(self, chunk: GatherChunk, kept: Tensor) -> Tensor:
        """With differences: the node shard [N, E16] as hop B sends it."""
        take, rows, device = self.wire.scratch.take, len(kept), kept.device
        with self.wire.label("all_gather", "encode"):
            size = (rows, chunk.kept.numel)
            values = take("all_gather.reference", *size, dtype=torch.float32, device=device)
            chunk.kept.decode(kept, values)
            encoded = take(
                f"all_gather.for_node.{chunk.number}", rows, chunk.received.row_bytes, device=device
            )
            chunk.received.encode(values, encoded)
        return encoded

    def _gather_in_node(
        self, chunk: GatherChunk, encoded: Tensor, group: ProcessGroup
    ) -> Generator[None, None, Tensor]:
        """Hop B: encoded [N, E] of every rank of the node -> [W, E]."""
        hop, (nodes, row_bytes) = self.hops[1], encoded.shape
        tag, rows = f"all_gather.gathered.{chunk.number}", hop.size * nodes
        gathered = self.wire.scratch.take(tag, rows, row_bytes, device=encoded.device)
        by_local = gathered.view(hop.size, nodes, row_bytes)
        by_local[self.wire.member(hop)].copy_(encoded)
        yield from self.wire.all_gather(hop, group, by_local)
        return gathered

    def _is_as_it_is(self, dtype: torch.dtype) -> bool:
        """Whether the backend's own all-gather does: a flat route, and nothing to encode."""
        if self.hops[0].name != "flat":
            return False
        name = kept_codec_name(self.hops, self.config, dtype)
        return name == "none" or (name == "bf16" and dtype == torch.bfloat16)

    def _as_it_is(
        self, output: Tensor, shard: Tensor, group: ProcessGroup, async_op: bool, hop_name: str
    ) -> dist.Work | None:
        """FSDP2's own all-gather, counted."""
        self.wire.count_ring("all_gather", hop_name, group, shard.numel() * shard.itemsize)
        work: dist.Work | None = dist.all_gather_single(output, shard, group=group, async_op=async_op)
        return work
