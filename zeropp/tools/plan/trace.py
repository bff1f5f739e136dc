"""A trace: what one rank does in one optimizer step, in the order in which the program starts it.

The dry run writes it, the cost model reads it. It holds no times: elements, bytes and FLOPs only, so one
trace serves every machine with the same nodes and ranks.

Order is the order of the program, not of execution: FSDP2 starts a gather and goes on. In backward the gather
of the next unit stands before the compute of this one, because FSDP2 prefetches it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ... import Ledger
from .memory_estimate import MemoryEstimate

Level = Literal["in-node", "across", "flat"]
"""Links that a hop uses. "flat": those inside nodes and those between them."""
Pattern = Literal["all_gather", "all_to_all", "reduce_scatter", "all_reduce"]
"""How a hop moves data: all_gather, reduce_scatter and all_reduce are rings, all_to_all sends to each."""
Phase = Literal["forward", "recompute", "backward", "optimizer"]


@dataclass(frozen=True)
class TracedHop:
    """One hop of one collective, as one rank sees it: what it sends, and what codecs do for it."""

    level: Level
    pattern: Pattern
    ranks: int
    """Ranks that take part."""
    wire_bytes: int
    """Sent by this rank, as the ledger counts."""
    across_bytes: int
    """The part of `wire_bytes` that leaves the node; of a ring, the node's total divided by its ranks."""
    chunks: int
    """Collectives that the bytes are cut into, so that one is encoded while another is on the wire."""
    encoded: int
    """Elements that this rank encodes before the hop."""
    decoded: int
    """Elements that this rank decodes after the hop, before another one encodes."""
    codec: str
    """A codec of `Config`; "none": elements as they are."""


@dataclass(frozen=True)
class Gather:
    """The weights of one unit are gathered."""

    unit: str
    hops: tuple[TracedHop, ...]


@dataclass(frozen=True)
class Reduce:
    """The gradients of one unit are reduced."""

    unit: str
    hops: tuple[TracedHop, ...]


@dataclass(frozen=True)
class Compute:
    """What is computed with the weights of one unit, up to the next event."""

    unit: str
    phase: Phase
    flops: int
    """FLOPs of matrix products, convolutions and attention, as torch.utils.flop_counter counts them."""
    bytes_touched: int
    """Read and written by all operations but views and those with FLOPs, whose time their FLOPs decide."""


Event = Gather | Reduce | Compute


@dataclass(frozen=True)
class Trace:
    """One optimizer step of one rank, after the first: FSDP2 is set up, the optimizer has its state."""

    events: tuple[Event, ...]
    parameters: int
    """Elements of all parameters of the model, without padding."""
    nodes: int
    ranks_per_node: int
    micro_batches: int
    tokens: int
    """What a rank reads in a step, all micro-batches together."""
    memory: MemoryEstimate
    overlaps: bool = False
    """Whether it sends while it computes on a CPU as well: see [Note: Overlap] in hardware.py."""
    lanes_bytes: int = 0
    """What it needs for that, on top of `memory`."""

    @property
    def flops(self) -> int:
        """FLOPs of this rank in one step, recomputation included."""
        return sum(event.flops for event in self.events if isinstance(event, Compute))

    def hops(self) -> Iterator[TracedHop]:
        """Every hop of the step."""
        for event in self.events:
            if not isinstance(event, Compute):
                yield from event.hops


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that one unit is sharded over, `ranks_per_node` on each of `nodes`."""

    nodes: int
    ranks_per_node: int

    def hops_of(self, sent: Ledger, gathered_over: int) -> tuple[TracedHop, ...]:
        """The hops of one call of a comm, in their order.

        Args:
            sent: the difference of the ledgers after the call and before it.
            gathered_over: ranks of the process group that FSDP2 passed; fewer than all for a gather after
                `reshard_after_forward=int`.
        """
        hops = []
        for key, traffic in sent.rows():
            work = [(by, done.elements) for by, done in sent.work() if by.hop == key.hop]
            codec = work[-1][0].codec if work else "none"
            pattern: Pattern = "all_gather"
            if key.collective == "reduce_scatter":
                is_ring = key.hop == "flat" and codec in ("none", "bf16")
                pattern = "reduce_scatter" if is_ring else "all_to_all"
            sizes = {"across": self.nodes, "in-node": self.ranks_per_node}
            hops.append(
                TracedHop(
                    level=self._level(key.hop),
                    pattern=pattern,
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
        """The links of a hop, whatever the route: a flat ring inside a node is in-node."""
        if hop in ("in-node", "post-forward") or self.nodes == 1:
            return "in-node"
        return "across" if hop == "across" or self.ranks_per_node == 1 else "flat"


def all_reduce_hop(numel: int, itemsize: int, ranks: int) -> TracedHop:
    """HSDP's all-reduce of gradients over replicas: a ring of FSDP2's own, which is not in the ledger.

    >>> all_reduce_hop(10, itemsize=4, ranks=4).wire_bytes
    72
    """
    piece = -(-numel // ranks) * itemsize
    sent = 2 * (ranks - 1) * piece
    return TracedHop("across", "all_reduce", ranks, sent, sent, chunks=1, encoded=0, decoded=0, codec="none")
