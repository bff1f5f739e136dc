"""The gather of one column group: encode, gather across nodes, store, gather inside the node, decode.

    packed shard [S] --encode--> [1, E]
      hop A, across:      [1, E] --all-gather over the N ranks of the rail--> node shard [N, E]
      hop B, in-node:  [N, E] --all-gather over the n ranks of the node------> [n, N, E]
    [n, N, E] --decode, row (l, i) to the slot of its rank--> the group's columns of full [W, S]

E is the size of an encoded row in bytes, payload and scales together. The node shard is hpZ's secondary
partition. While it is fresh, a gather runs hop B alone, and decodes the same bytes as the gather before. On
one node, with one rank per node, or on the flat route, there is one hop.

With weights="delta-int4" the node shard is in 16 bits, hop A updates it by differences (delta_weights.py),
and hop B sends it with the codec `delta_in_node`.

[Note: Own slot]
FSDP2 passes `input_tensor` as a view into `output_tensor`. The rank's own slot is overwritten with the
decoded values like any other slot: all ranks must compute with the same weights. So all code that reads the
shard runs before the first chunk is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..config import Config
from ..topology import Hop
from .column_groups import ColumnGroup, columns_as
from .delta_weights import send_difference
from .execution import run_to_end
from .layout import DecodeTarget, GatherChunk, gather_chunks, kept_codec_name
from .node_shard import NodeShard, Send, fingerprint
from .wire import Wire


@dataclass(frozen=True)
class Gathering:
    """Arguments and decisions of one gather of a group."""

    shard: Tensor
    """The packed shard [S]."""
    out: Tensor
    """The whole buffer [W, S] of the unit."""
    send: Send
    group: ProcessGroup
    slot: int
    """Names scratch buffers; see `Transfer.prepare` in execution.py."""


class GroupGather:
    """Gathers one column group of a unit, and owns its node shard."""

    def __init__(
        self,
        wire: Wire,
        hops: tuple[Hop, ...],
        config: Config,
        columns: ColumnGroup,
        first_chunk: int = 0,
        versions: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self.wire = wire
        self.hops = hops
        self.columns = columns
        self.chunks = gather_chunks(wire, hops, config, columns, first_chunk)
        name, dtype = kept_codec_name(hops, config, columns.dtype), columns.dtype
        self.is_plain = hops[0].name == "flat" and (
            name == "none" or (name, dtype) == ("bf16", torch.bfloat16)
        )
        """Whether the backend's own all-gather gives the same result: a flat route, and nothing to encode."""
        self.node_shard: NodeShard | None = None
        if config.secondary and hops[0].name == "across":
            self.node_shard = NodeShard(
                wire.unit,
                takes_differences=config.weights == "delta-int4",
                refresh_every=config.refresh_every,
                weights_version=lambda: self._version(versions()),
            )
        # Two hops gather rows sorted by rail; decoding puts them in the order of ranks.
        self._row_order = wire.topology.row_order if len(hops) == 2 else None

    @property
    def node_shard_bytes(self) -> int:
        """Bytes of the node shard after the first gather."""
        if self.node_shard is None:
            return 0
        return sum(self.hops[0].size * chunk.sent.row_bytes for chunk in self.chunks)

    def prepare(self, is_early: bool, device: torch.device) -> None:
        """Prepare a gather. Runs in the caller's thread."""
        if self.node_shard is not None:
            self.node_shard.prepare(is_early, device)
            for chunk in self.chunks:
                # Allocate in the thread that frees: malloc need not return memory of short-lived threads.
                self._kept_row(chunk, device)

    def _kept_row(self, chunk: GatherChunk, device: torch.device) -> Tensor:
        """Return the node shard of a chunk, [N, E]."""
        assert self.node_shard is not None
        return self.node_shard.buffer(chunk.number, self.hops[0].size, chunk.sent.row_bytes, device)

    def why_not_load(self, state: Mapping[str, Any]) -> str | None:
        """Return why a saved reference does not fit this group, or None."""
        saved, mine = [len(row) for row in state["rows"]], [chunk.sent.row_bytes for chunk in self.chunks]
        return None if saved == mine else f"a reference of {saved} bytes by chunk, expected {mine}"

    def load_state_dict(
        self, state: Mapping[str, Any], shard_group: ProcessGroup, device: torch.device
    ) -> None:
        """Restore the reference: this rank's row from `state`, the other rows from the ranks of the rail."""
        hop, kept = self.hops[0], self.node_shard
        if kept is None or not kept.takes_differences:
            return
        with kept.in_use(device):
            for chunk, row in zip(self.chunks, state["rows"], strict=True):
                rows = self._kept_row(chunk, device)
                rows[self.wire.member(hop)].copy_(row)
                run_to_end(self.wire.all_gather(hop, shard_group, rows, chunk.number))
        kept.load_state_dict(state)

    @contextmanager
    def gathering(self, shard: Tensor, out: Tensor, group: ProcessGroup, slot: int) -> Iterator[Gathering]:
        """Context of the gather of a shard [S] to out [W, S]: decides what is sent, and records it.

        It is entered before the first chunk of any group is decoded: see [Note: Own slot].
        """
        packed, kept = self.columns.pack(shard), self.node_shard
        if kept is None:
            yield Gathering(packed, out, Send.WEIGHTS, group, slot)
            return
        with kept.in_use(shard.device):
            send = kept.next_send
            if send is Send.NOTHING:
                kept.check(packed, self.wire.alarm)
                yield Gathering(packed, out, send, group, slot)
            else:
                source = fingerprint(packed)  # now: the gather may overwrite `packed`, see [Note: Own slot]
                yield Gathering(packed, out, send, group, slot)
                kept.gathered(send, source)

    def gather(self, gathering: Gathering, chunk: GatherChunk) -> Generator[None]:
        """Gather one chunk: its columns of this rank's packed shard [S] -> its columns of out [W, S]."""
        wire, first, kept = self.wire, self.hops[0], self.node_shard
        shard, send, group = gathering.shard[chunk.at], gathering.send, gathering.group
        size, device, member = (first.size, chunk.sent.row_bytes), shard.device, wire.member(first)
        # Buffers in use across a yield need separate names for each transfer and chunk.
        key = f"{gathering.slot}.{chunk.number}"
        if kept is None:
            encoded = wire.scratch.take(f"all_gather.encoded.{key}", *size, device=device)
        else:
            encoded = self._kept_row(chunk, device)  # [N, E]
        if send is Send.DIFFERENCE and chunk.difference is not None:
            yield from send_difference(wire, first, group, chunk, shard, encoded, key)
        elif send is not Send.NOTHING:
            with wire.label("all_gather", "encode"):
                chunk.sent.encode(shard.view(1, -1), encoded[member : member + 1])
            yield from wire.all_gather(first, group, encoded, chunk.number)
        if len(self.hops) == 2:
            if chunk.encodes_for_node:
                encoded = self._encode_for_node(chunk, encoded, key)
            encoded = yield from self._gather_in_node(chunk, encoded, group, key)
        with wire.label("all_gather", "decode"):
            for place in chunk.places:
                self._decode(place, encoded, gathering.out)

    def _encode_for_node(self, chunk: GatherChunk, kept: Tensor, key: str) -> Tensor:
        """Encode the node shard [N, E16] of differences for hop B."""
        take, rows, device = self.wire.scratch.take, len(kept), kept.device
        with self.wire.label("all_gather", "encode"):
            size = (rows, chunk.kept.numel)
            # No key in the name: used up before the next yield.
            values = take("all_gather.reference", *size, dtype=torch.float32, device=device)
            chunk.kept.decode(kept, values)
            encoded = take(f"all_gather.for_node.{key}", rows, chunk.received.row_bytes, device=device)
            chunk.received.encode(values, encoded)
        return encoded

    def _gather_in_node(
        self, chunk: GatherChunk, encoded: Tensor, group: ProcessGroup, key: str
    ) -> Generator[None, None, Tensor]:
        """Run hop B: encoded [N, E] of every rank of the node -> [W, E]."""
        hop, (nodes, row_bytes) = self.hops[1], encoded.shape
        size = (hop.size * nodes, row_bytes)
        gathered = self.wire.scratch.take(f"all_gather.gathered.{key}", *size, device=encoded.device)
        by_local = gathered.view(hop.size, nodes, row_bytes)
        by_local[self.wire.member(hop)].copy_(encoded)
        yield from self.wire.all_gather(hop, group, by_local, chunk.number)
        return gathered

    def _decode(self, place: DecodeTarget, encoded: Tensor, out: Tensor) -> None:
        """Decode encoded [W, E] to the columns of the target in out [W, S]."""
        encoded, columns = encoded[:, place.at], out[:, place.columns]
        elements = columns_as(self.columns.dtype, columns)
        if elements is not None:
            place.codec.decode(encoded, elements, self._row_order)
            return
        # Raw bytes of mixed dtypes, at an address that is not aligned for this dtype.
        size = (len(out), place.codec.numel)
        elements = self.wire.scratch.take(
            "all_gather.elements", *size, dtype=self.columns.dtype, device=out.device
        )
        place.codec.decode(encoded, elements, self._row_order)
        columns.copy_(elements.view(out.dtype))

    def _version(self, versions: Sequence[int]) -> list[int]:
        """Return the versions of this group's parameters."""
        members = self.columns.members
        return [version for index, version in enumerate(versions) if members is None or index in members]
