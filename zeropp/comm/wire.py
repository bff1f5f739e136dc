"""The wire of one unit: runs the collective of a hop, counts it in the ledger, labels it for the profiler."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..topology import Hop, Topology
from .cuda_graphs import refuse_capture
from .ledger import Ledger
from .profiler_labels import Collective, Label, labelled
from .stale_weights import Alarm

CHUNK_BITS = 10  # of the 31 bits of a message's tag


def tag_of(unit: str, chunk: int = 0) -> int:
    """Return the tag of a chunk's messages. Units whose tags collide take turns, like calls of one unit."""
    return crc32(unit.encode()) >> (CHUNK_BITS + 1) << CHUNK_BITS | chunk % (1 << CHUNK_BITS)


class Scratch:
    """Buffers that all units reuse, one unit after the other.

    On CPU, the page faults of a new tensor cost more than filling it. Devices with streams have a caching
    allocator that reuses memory and respects streams, so there each `take` allocates a new tensor.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tag: str, *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device) -> Tensor:
        """Return a buffer with arbitrary content. Valid until the next `take` of the same tag."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(tag)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._buffers[tag] = empty_outside_inference(nbytes, device)
        return buffer[:nbytes].view(dtype).view(shape)

    def release(self) -> None:
        """Free the memory. The next `take` allocates again."""
        self._buffers.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        # list(): a comm thread may add a buffer meanwhile.
        return sum(buffer.numel() for buffer in list(self._buffers.values()))


def empty_outside_inference(nbytes: int, device: torch.device) -> Tensor:
    """Return a buffer that outlives the call. Training could not write to an inference tensor later."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


class Ring(NamedTuple):
    """A ring over some ranks. Each rank passes on all pieces but one."""

    others: int
    """Ranks of the ring without this one."""
    leaving: int
    """Links of the ring that leave this rank's node."""
    in_node: int
    """Ranks of the ring on this rank's node."""

    def sent_bytes(self, piece_bytes: int) -> tuple[int, int]:
        """Return the bytes that a rank sends, and this rank's share of the bytes that leave its node.

        Only ranks whose successor is on another node send across nodes. The numbering of ranks decides which
        ranks these are, so the node's total is divided evenly.
        """
        wire_bytes = self.others * piece_bytes
        return wire_bytes, wire_bytes * self.leaving // self.in_node


class Wire:
    """State and collectives that the two comms of one unit share."""

    def __init__(
        self,
        unit: str,
        topology: Topology,
        ledger: Ledger,
        scratch: Scratch,
        alarm: Alarm | None = None,
        on_gloo: bool = False,
    ) -> None:
        self.alarm = Alarm() if alarm is None else alarm
        """The alarm of the whole model. A unit without a model has a separate one."""
        self.on_gloo = on_gloo
        """Whether hops have the cost of gloo's; see [Note: Chunks] in chunks.py."""
        self.unit = unit
        self.topology = topology
        self.ledger = ledger
        self.scratch = scratch
        self._flat_ring = self._ring_of([topology.ranks[position] for position in topology.ring])
        # Weak keys: the wire must not keep a destroyed process group alive.
        self._rings: WeakKeyDictionary[ProcessGroup, Ring] = WeakKeyDictionary()
        my_node = topology.node_of[topology.rank]
        self._on_other_nodes = sum(node != my_node for node in topology.node_of)
        self._labels: dict[tuple[Collective, str], str] = {}

    def member(self, hop: Hop) -> int:
        """Return this rank's position among the members of the hop."""
        return self.topology.rank if hop.group is None else hop.group.rank()

    def label(self, collective: Collective, part: str) -> AbstractContextManager[Any]:
        """Return a context that labels its operations in a profile; see profiler_labels.py."""
        text = self._labels.get((collective, part))
        if text is None:
            text = self._labels[collective, part] = str(Label(collective, part, self.unit))
        return labelled(text)

    def check(self, device: torch.device) -> None:
        """Raise during a graph capture, and for known stale weights. Runs before each transfer."""
        refuse_capture(self.unit, device)
        if self.alarm.on_the_way:
            self.alarm.raise_if_known()

    def tag(self, chunk: int) -> int:
        """Return the tag of a chunk's messages; see [Note: Order in a thread] in cpu/comm_threads.py."""
        return tag_of(self.unit, chunk)

    def all_gather(self, hop: Hop, group: ProcessGroup, pieces: Tensor, chunk: int = 0) -> Generator[None]:
        """Gather pieces [hop.size, ...] in place: each member has filled its own. Yields on the way.

        All members start the gathers of one chunk in the same order; on a flat route, those of all chunks.
        """
        group, me = hop.group or group, self.member(hop)
        with self.label("all_gather", hop.name):
            if is_direct := _is_direct(hop, pieces):
                works = _swap(
                    group, {peer: (pieces[me], pieces[peer]) for peer in _peers(hop, me)}, self.tag(chunk)
                )
            else:
                works = [dist.all_gather_single(pieces.view(-1), pieces[me].view(-1), group, async_op=True)]
        self.count_ring("all_gather", hop.name, group, pieces.nbytes // hop.size)
        yield
        with self.label("all_gather", hop.name):
            for work in works:
                if is_direct:  # gloo's messages ignore a timeout that was changed later
                    hop.wait_for(work)
                else:
                    work.wait()

    def all_to_all(
        self, hop: Hop, group: ProcessGroup, pieces: Tensor, out: Tensor, chunk: int = 0
    ) -> Generator[None]:
        """Set out[k] to member k's pieces[own rank]; both are [hop.size, ...]. Yields on the way."""
        group, me = hop.group or group, self.member(hop)
        with self.label("reduce_scatter", hop.name):
            if is_direct := _is_direct(hop, pieces):
                works = _swap(
                    group, {peer: (pieces[peer], out[peer]) for peer in _peers(hop, me)}, self.tag(chunk)
                )
                out[me].copy_(pieces[me])
            else:
                works = [dist.all_to_all_single(out.view(-1), pieces.view(-1), group=group, async_op=True)]
        self._count_all_to_all(hop, pieces.nbytes // hop.size)
        yield
        with self.label("reduce_scatter", hop.name):
            for work in works:
                if is_direct:  # as in all_gather
                    hop.wait_for(work)
                else:
                    work.wait()

    def count_ring(
        self, collective: Collective, hop_name: str, group: ProcessGroup, piece_bytes: int
    ) -> None:
        """Count a ring over a group, in which every rank passes on all pieces but one."""
        ring = self._rings.get(group)
        if ring is None:
            ring = self._rings[group] = self._ring_of(dist.get_process_group_ranks(group))
        wire_bytes, across_bytes = ring.sent_bytes(piece_bytes)
        self.ledger.record(self.unit, collective, hop_name, wire_bytes=wire_bytes, across_bytes=across_bytes)

    def count_flat_ring(self, collective: Collective, piece_bytes: int) -> None:
        """Count a ring over all ranks, node by node: NCCL's, or zeropp's own (bf16_ring.py)."""
        wire_bytes, across_bytes = self._flat_ring.sent_bytes(piece_bytes)
        self.ledger.record(self.unit, collective, "flat", wire_bytes=wire_bytes, across_bytes=across_bytes)

    def _count_all_to_all(self, hop: Hop, piece_bytes: int) -> None:
        others = hop.size - 1
        others_across = {"in-node": 0, "across": others, "flat": self._on_other_nodes}[hop.name]
        self.ledger.record(
            self.unit,
            "reduce_scatter",
            hop.name,
            wire_bytes=others * piece_bytes,
            across_bytes=others_across * piece_bytes,
        )

    def count_baseline(self, collective: Collective, shard_numel: int) -> None:
        """Count the bytes that 16-bit FSDP2 would have sent for this call: a flat ring of 2-byte elements."""
        wire_bytes, across_bytes = self._flat_ring.sent_bytes(2 * shard_numel)
        self.ledger.record_baseline(self.unit, collective, wire_bytes=wire_bytes, across_bytes=across_bytes)

    def _ring_of(self, ranks: Sequence[int]) -> Ring:
        """Return the ring over these ranks, in their order."""
        by_rank = dict(zip(self.topology.ranks, self.topology.node_of, strict=True))
        nodes, mine = [by_rank[rank] for rank in ranks], self.topology.node_of[self.topology.rank]
        leaving = sum(
            node == mine and successor != mine
            for node, successor in zip(nodes, [*nodes[1:], nodes[0]], strict=True)
        )
        return Ring(len(ranks) - 1, leaving, nodes.count(mine))


def _is_direct(hop: Hop, pieces: Tensor) -> bool:
    """Whether members send messages to each other, instead of calling the backend's collective.

    gloo's collectives copy into their own buffers and back. A message goes from our memory to the memory of
    its receiver. A flat route stays a ring: with messages, a piece would cross to a node several times.
    """
    return pieces.device.type == "cpu" and hop.name != "flat"


def _peers(hop: Hop, me: int) -> list[int]:
    """Return all other members, the next one first, so that not all members send to the same one at once."""
    return [(me + distance) % hop.size for distance in range(1, hop.size)]


def _swap(group: ProcessGroup, messages: dict[int, tuple[Tensor, Tensor]], tag: int) -> list[dist.Work]:
    """Start to send the first of two tensors to each peer, and to receive the second from it."""
    receives = [
        dist.irecv(into, group=group, group_src=peer, tag=tag) for peer, (_, into) in messages.items()
    ]
    sends = [dist.isend(sent, group=group, group_dst=peer, tag=tag) for peer, (sent, _) in messages.items()]
    return [work for work in (*receives, *sends) if work is not None]
