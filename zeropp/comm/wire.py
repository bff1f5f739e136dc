"""The wire of one unit: runs the collective of a hop, counts it in the ledger, labels it for the profiler."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from ..labels import Collective, Label
from ..topology import Hop, Topology
from .ledger import Ledger


class Scratch:
    """Buffers that are used again by every unit, one after the other.

    On CPU a fresh tensor costs page faults, more than filling it. Devices with streams have a caching
    allocator that already reuses memory, and knows about streams, so there the buffers are fresh.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tag: str, *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device) -> Tensor:
        """A buffer with arbitrary content. Valid until the next `take` of the same tag."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(tag)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._buffers[tag] = empty_for_keeps(nbytes, device)
        return buffer[:nbytes].view(dtype).view(shape)

    @property
    def nbytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers.values())

    def release(self) -> None:
        """Give up the memory. The next `take` allocates anew."""
        self._buffers.clear()


def empty_for_keeps(nbytes: int, device: torch.device) -> Tensor:
    """Bytes that outlive the call: never an inference tensor, which training could not write to later."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Wire:
    """What the comms of one unit share."""

    unit: str
    topology: Topology
    ledger: Ledger
    scratch: Scratch

    def all_gather(self, hop: Hop, group: ProcessGroup, pieces: Tensor) -> Generator[None]:
        """pieces [hop.size, ...]: each member has filled its own, and gets the others. Yields on the way."""
        group = hop.group or group
        me, label = group.rank(), str(Label("all_gather", hop.name, self.unit))
        with record_function(label):
            if _is_direct(hop, pieces):
                works = _swap(group, {peer: (pieces[me], pieces[peer]) for peer in _peers(hop, me)})
            else:
                works = [dist.all_gather_single(pieces.view(-1), pieces[me].view(-1), group, async_op=True)]
        self.count_ring("all_gather", hop.name, group, pieces[me].numel() * pieces.itemsize)
        yield
        with record_function(label):
            for work in works:
                work.wait()

    def all_to_all(self, hop: Hop, group: ProcessGroup, pieces: Tensor, out: Tensor) -> Generator[None]:
        """out[k] = what member k had in pieces[own rank]; both [hop.size, ...]. Yields on the way."""
        group = hop.group or group
        me, label = group.rank(), str(Label("reduce_scatter", hop.name, self.unit))
        with record_function(label):
            if _is_direct(hop, pieces):
                works = _swap(group, {peer: (pieces[peer], out[peer]) for peer in _peers(hop, me)})
                out[me].copy_(pieces[me])
            else:
                works = [dist.all_to_all_single(out.view(-1), pieces.view(-1), group=group, async_op=True)]
        self._count_all_to_all(hop, pieces)
        yield
        with record_function(label):
            for work in works:
                work.wait()

    def count_ring(
        self, collective: Collective, hop_name: str, group: ProcessGroup, piece_bytes: int
    ) -> None:
        """Record a ring over a group in which every rank passes on all pieces but one."""
        ranks = dist.get_process_group_ranks(group)
        wire_bytes = (len(ranks) - 1) * piece_bytes
        across_bytes = self._ring_share_across(wire_bytes, ranks)
        self.ledger.record(self.unit, collective, hop_name, wire_bytes=wire_bytes, across_bytes=across_bytes)

    def count_flat_ring(self, collective: Collective, piece_bytes: int) -> None:
        """Record a ring over all ranks, node by node, as NCCL has it, and zeropp's own."""
        wire_bytes = (self.topology.size - 1) * piece_bytes
        across_bytes = self._flat_ring_across(wire_bytes)
        self.ledger.record(self.unit, collective, "flat", wire_bytes=wire_bytes, across_bytes=across_bytes)

    def _count_all_to_all(self, hop: Hop, pieces: Tensor) -> None:
        piece_bytes = pieces.numel() * pieces.itemsize // hop.size
        node = self.topology.node_of[self.topology.rank]
        others_across = {
            "in-node": 0,
            "across": hop.size - 1,
            "flat": sum(other != node for other in self.topology.node_of),
        }[hop.name]
        self.ledger.record(
            self.unit,
            "reduce_scatter",
            hop.name,
            wire_bytes=(hop.size - 1) * piece_bytes,
            across_bytes=others_across * piece_bytes,
        )

    def count_baseline(self, collective: Collective, shard_numel: int) -> None:
        """Record what 16-bit FSDP2 would have sent for this call: a flat ring of 2-byte elements."""
        wire_bytes = (self.topology.size - 1) * shard_numel * 2
        self.ledger.record_baseline(
            self.unit,
            collective,
            wire_bytes=wire_bytes,
            across_bytes=self._flat_ring_across(wire_bytes),
        )

    def _flat_ring_across(self, wire_bytes: int) -> int:
        return self._ring_share_across(wire_bytes, [self.topology.ranks[p] for p in self.topology.ring])

    def _ring_share_across(self, wire_bytes: int, ranks: Sequence[int]) -> int:
        """This rank's share of what a ring over `ranks` sends out of its node, if each sends `wire_bytes`.

        Only ranks whose successor is on another node send across. Which ones they are is an accident of
        numbering, so the node's total is divided evenly.
        """
        by_rank = dict(zip(self.topology.ranks, self.topology.node_of, strict=True))
        nodes, mine = [by_rank[rank] for rank in ranks], self.topology.node_of[self.topology.rank]
        leaving = sum(
            node == mine and successor != mine
            for node, successor in zip(nodes, [*nodes[1:], nodes[0]], strict=True)
        )
        return wire_bytes * leaving // nodes.count(mine)


def _is_direct(hop: Hop, pieces: Tensor) -> bool:
    """Whether members send to each other directly, instead of calling the backend's collective.

    gloo's collectives copy into buffers of their own and back. A message between two ranks goes from our
    memory into theirs. A flat route stays a ring: sent directly, a piece would cross to a node several times.
    """
    return pieces.device.type == "cpu" and hop.name != "flat"


def _peers(hop: Hop, me: int) -> list[int]:
    """All other members, the next one first, so that not everybody sends to the same one at once."""
    return [(me + distance) % hop.size for distance in range(1, hop.size)]


def _swap(group: ProcessGroup, messages: dict[int, tuple[Tensor, Tensor]]) -> list[dist.Work]:
    """Start to send the first of two tensors to each peer, and to receive the second from it."""
    receives = [dist.irecv(into, group=group, group_src=peer) for peer, (_, into) in messages.items()]
    sends = [dist.isend(sent, group=group, group_dst=peer) for peer, (sent, _) in messages.items()]
    return [work for work in (*receives, *sends) if work is not None]
