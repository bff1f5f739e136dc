"""The hops of one call of a comm: what the ledger has more of afterwards."""

from __future__ import annotations

from copy import copy

from torch import Tensor
from torch.distributed import ProcessGroup

from ..comm.ledger import CodecWork, Ledger, Operation, Traffic
from ..labels import Collective as Counted
from ..topology import Topology
from .trace import Collective, Gather, Hop, Level, Reduce

ENCODES: set[Operation] = {"encode", "recode_to"}


class HopMeter:
    """Reads the hops of one unit's calls off the ledger."""

    def __init__(
        self, kind: type[Gather] | type[Reduce], unit: str, topology: Topology, ledger: Ledger
    ) -> None:
        self._kind = kind
        self._collective: Counted = "all_gather" if kind is Gather else "reduce_scatter"
        self._unit = unit
        self._topology = topology
        self._ledger = ledger
        self._sent_before: dict[str, Traffic] = {}
        self._work_before: dict[tuple[str, Operation, str], CodecWork] = {}

    def start(self) -> None:
        self._sent_before, self._work_before = self._sent(), self._work()

    def event(self, group: ProcessGroup) -> Gather | Reduce:
        """The call that has just run, over this group."""
        return self._kind(
            self._unit,
            tuple(
                self._hop(name, group.size(), traffic, self._sent_before.get(name, Traffic()))
                for name, traffic in self._sent().items()
                if traffic != self._sent_before.get(name)
            ),
        )

    def _hop(self, name: str, ranks: int, sent: Traffic, before: Traffic) -> Hop:
        encoded = decoded = 0
        codec = "none"
        for (hop, operation, used), work in self._work().items():
            elements = work.elements - self._work_before.get((hop, operation, used), CodecWork()).elements
            if hop == name and elements:
                codec = used
                encoded += elements if operation in ENCODES else 0
                decoded += elements if operation not in ENCODES else 0
        collective: Collective = "all_gather"
        if self._kind is Reduce:
            is_ring = name == "flat" and codec in ("none", "bf16")
            collective = "reduce_scatter" if is_ring else "all_to_all"
        return Hop(
            level=self._level(name),
            collective=collective,
            ranks=self._size(name, ranks),
            wire_bytes=sent.wire_bytes - before.wire_bytes,
            across_bytes=sent.across_bytes - before.across_bytes,
            chunks=sent.calls - before.calls,
            encoded=encoded,
            decoded=decoded,
            codec=codec,
        )

    def _sent(self) -> dict[str, Traffic]:
        """By hop, in the order of the hops."""
        return {
            key.hop: copy(traffic)
            for key, traffic in self._ledger.rows()
            if (key.unit, key.collective) == (self._unit, self._collective)
        }

    def _work(self) -> dict[tuple[str, Operation, str], CodecWork]:
        return {
            (key.hop, key.operation, key.codec): copy(work)
            for key, work in self._ledger.work()
            if (key.unit, key.collective) == (self._unit, self._collective)
        }

    def _size(self, name: str, ranks: int) -> int:
        nodes = len(self._topology.nodes)
        return {"across": nodes, "in-node": self._topology.size // nodes}.get(name, ranks)

    def _level(self, name: str) -> Level:
        """Of the links, whatever the route: a flat ring inside a node is in-node."""
        if name == "in-node" or name == "post-forward" or self._topology.is_one_node:
            return "in-node"
        return "across" if name == "across" or len(self._topology.rails) == 1 else "flat"


def all_reduce_hop(gradients: Tensor, ranks: int) -> Hop:
    """HSDP's ring over replicas, which is FSDP2's own and not in the ledger.

    >>> import torch
    >>> all_reduce_hop(torch.zeros(10), ranks=4).wire_bytes
    72
    """
    piece = -(-gradients.numel() // ranks) * gradients.itemsize
    sent = 2 * (ranks - 1) * piece
    return Hop("across", "all_reduce", ranks, sent, sent, chunks=1, encoded=0, decoded=0, codec="none")
