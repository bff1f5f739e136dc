"""A trace: the gathers, reductions and compute of one rank in one optimizer step.

The dry run writes it and the cost model reads it. It has elements, bytes and FLOPs, and no times, so one
trace serves every cluster with the same nodes and ranks.

Events are in the order in which the program starts them, not in the order of their execution. In backward the
gather of the next unit precedes the compute of the current one, because FSDP2 prefetches it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ... import Ledger
from .memory_estimate import MemoryEstimate

Level = Literal["in-node", "across", "flat"]
"""Links that a hop uses. "flat": links inside nodes and links between them."""
Pattern = Literal["all_gather", "all_to_all", "reduce_scatter", "all_reduce"]
"""Algorithm of a hop. all_gather, reduce_scatter and all_reduce are rings. In an all_to_all each rank sends
to each other rank."""
Phase = Literal["forward", "recompute", "backward", "optimizer"]


@dataclass(frozen=True)
class TracedHop:
    """One hop of one collective on one rank: its bytes, and the work of its codecs."""

    level: Level
    pattern: Pattern
    ranks: int
    """Number of ranks that take part."""
    wire_bytes: int
    """Bytes that this rank sends, as the ledger counts them."""
    across_bytes: int
    """The part of `wire_bytes` that leaves the node. In a ring, the node's total divided by its ranks."""
    chunks: int
    """Number of collectives that share the bytes. One is encoded while another one is on the wire."""
    encoded: int
    """Elements that this rank encodes before the hop."""
    decoded: int
    """Elements that this rank decodes after the hop."""
    codec: str
    """A codec of `Config`. "none": elements are sent uncompressed."""


@dataclass(frozen=True)
class Gather:
    """Gather of the weights of one unit."""

    unit: str
    hops: tuple[TracedHop, ...]


@dataclass(frozen=True)
class Reduce:
    """Reduction of the gradients of one unit."""

    unit: str
    hops: tuple[TracedHop, ...]


@dataclass(frozen=True)
class Compute:
    """Compute with the weights of one unit, up to the next event."""

    unit: str
    phase: Phase
    flops: int
    """FLOPs of matrix products, convolutions and attention, as torch.utils.flop_counter counts them."""
    bytes_touched: int
    """Bytes that operations without FLOPs read and write. Views count nothing. FLOPs alone decide the time of
    all other operations."""


Event = Gather | Reduce | Compute


@dataclass(frozen=True)
class Trace:
    """One optimizer step of one rank. It is not the first step, so all lazy state exists."""

    events: tuple[Event, ...]
    parameters: int
    """Number of elements of all parameters of the model, without padding."""
    nodes: int
    ranks_per_node: int
    micro_batches: int
    tokens: int
    """Tokens that a rank reads in all micro-batches."""
    memory: MemoryEstimate
    """Memory at the step's peak."""
    overlaps: bool = False
    """Whether communication overlaps compute on a CPU, too: see [Note: Overlap] in hardware.py."""
    comm_thread_bytes: int = 0
    """Bytes that this overlap needs on top of `memory`."""

    @property
    def flops(self) -> int:
        """FLOPs of this rank in the step, recomputation included."""
        return sum(event.flops for event in self.events if isinstance(event, Compute))

    def hops(self) -> Iterator[TracedHop]:
        """Yield every hop of the step."""
        for event in self.events:
            if not isinstance(event, Compute):
                yield from event.hops


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that one unit is sharded over, `ranks_per_node` on each of `nodes`."""

    nodes: int
    ranks_per_node: int

    def hops_of(self, ledger: Ledger, gathered_over: int) -> tuple[TracedHop, ...]:
        """Return the hops of one call of a comm, in their order.

        Args:
            ledger: the traffic and the codec work of this call alone.
            gathered_over: size of the process group that FSDP2 passed. It is smaller than the shard group in
                a gather after `reshard_after_forward=int`.
        """
        sizes = {"across": self.nodes, "in-node": self.ranks_per_node}
        hops = []
        for key, traffic in ledger.rows():
            work = [(by, done.elements) for by, done in ledger.work() if by.hop == key.hop]
            codec = work[-1][0].codec if work else "none"
            hops.append(
                TracedHop(
                    level=self._level(key.hop),
                    pattern=_pattern(key.collective, key.hop, codec),
                    ranks=sizes.get(key.hop, gathered_over),
                    wire_bytes=traffic.wire_bytes,
                    across_bytes=traffic.across_bytes,
                    chunks=traffic.calls,
                    encoded=sum(elements for by, elements in work if by.encodes),
                    decoded=sum(elements for by, elements in work if not by.encodes),
                    codec=codec,
                )
            )
        return tuple(hops)

    def _level(self, hop: str) -> Level:
        """Return the links that a hop of the ledger uses. A flat ring inside one node is in-node."""
        if hop in ("in-node", "post-forward") or self.nodes == 1:
            return "in-node"
        return "across" if hop == "across" or self.ranks_per_node == 1 else "flat"


def _pattern(collective: str, hop: str, codec: str) -> Pattern:
    """Return the algorithm that comms use for a hop of the ledger."""
    if collective == "all_gather":
        return "all_gather"
    is_ring = hop == "flat" and codec in ("none", "bf16")
    return "reduce_scatter" if is_ring else "all_to_all"


def all_reduce_hop(numel: int, itemsize: int, ranks: int) -> TracedHop:
    """Return HSDP's all-reduce of gradients over replicas. FSDP2 runs it, so it is not in the ledger.

    >>> all_reduce_hop(10, itemsize=4, ranks=4).wire_bytes
    72
    """
    piece = -(-numel // ranks) * itemsize
    sent = 2 * (ranks - 1) * piece
    return TracedHop("across", "all_reduce", ranks, sent, sent, chunks=1, encoded=0, decoded=0, codec="none")
