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

from .memory import MemoryEstimate

Level = Literal["in-node", "across", "flat"]
Collective = Literal["all_gather", "all_to_all", "reduce_scatter", "all_reduce"]
Phase = Literal["forward", "recompute", "backward", "optimizer"]


@dataclass(frozen=True)
class Hop:
    """One hop of one collective, as one rank sees it."""

    level: Level
    """"flat": a group of ranks on several nodes, several on each. Otherwise the links that all of it uses."""
    collective: Collective
    """How it moves data: all_gather, reduce_scatter and all_reduce are rings, all_to_all sends to each."""
    ranks: int
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
    hops: tuple[Hop, ...]


@dataclass(frozen=True)
class Reduce:
    """The gradients of one unit are reduced."""

    unit: str
    hops: tuple[Hop, ...]


@dataclass(frozen=True)
class Compute:
    """What is computed with the weights of one unit, up to the next event."""

    unit: str
    phase: Phase
    flops: int
    """Of matrix products, convolutions and attention, as torch.utils.flop_counter counts them."""
    bytes_touched: int
    """Read and written by all operations but views and those with FLOPs, whose time their FLOPs decide."""


Event = Gather | Reduce | Compute


@dataclass(frozen=True)
class Trace:
    """One optimizer step of one rank, after the first: FSDP2 is set up, the optimizer has its state."""

    events: tuple[Event, ...]
    parameters: int
    """Of the whole model, without padding."""
    nodes: int
    ranks_per_node: int
    micro_batches: int
    tokens: int
    """Per rank and step, all micro-batches together."""
    memory: MemoryEstimate

    @property
    def flops(self) -> int:
        """Of this rank in one step, recomputation included."""
        return sum(event.flops for event in self.events if isinstance(event, Compute))

    def hops(self) -> Iterator[Hop]:
        """Every hop of the step."""
        for event in self.events:
            if not isinstance(event, Compute):
                yield from event.hops
