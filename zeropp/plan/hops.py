"""The hops of one call of a comm: what the ledger has more of afterwards, and what was encoded for it."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..comm.ledger import Ledger, Traffic
from ..labels import Collective as Counted
from ..quant import QUANTIZABLE_DTYPES
from ..topology import Topology
from ..treatment import Treatment
from .trace import Collective, Gather, Hop, Level, Reduce


class HopMeter:
    """Reads the hops of one unit's calls off the ledger."""

    def __init__(
        self, kind: type[Gather] | type[Reduce], treatment: Treatment, topology: Topology, ledger: Ledger
    ) -> None:
        self._kind = kind
        self._unit = treatment.unit.name
        self._config = treatment.config
        self._topology = topology
        self._ledger = ledger
        self._before: dict[tuple[Counted, str], Traffic] = {}

    def start(self) -> None:
        self._before = self._counters()

    def event(self, sent: Tensor, group: ProcessGroup) -> Gather | Reduce:
        """Of a call that has just run, with this tensor as its input."""
        if self._kind is Gather:
            return Gather(self._unit, self._gather_hops(sent, group.size()))
        return Reduce(self._unit, self._reduce_hops(sent))

    def _gather_hops(self, shard: Tensor, ranks: int) -> tuple[Hop, ...]:
        """`shard` [S] of this rank became the full weights of `ranks` ranks."""
        as_it_is = shard.dtype not in QUANTIZABLE_DTYPES or self._config.weights == "none"
        keeps_dtype = self._config.weights == "bf16" and shard.dtype == torch.bfloat16
        is_flat = self._config.route == "flat" or ranks != self._topology.size
        uncoded = is_flat and (as_it_is or keeps_dtype)
        sent = self._sent()
        return tuple(
            Hop(
                level=self._level(name),
                collective="all_gather",
                ranks=self._size(name, ranks),
                wire_bytes=traffic.wire_bytes,
                across_bytes=traffic.across_bytes,
                chunks=traffic.calls,
                encoded=0 if uncoded else self._encoded(name, shard),
                decoded=0 if uncoded else self._decoded(name, name == sent[-1][0], ranks, shard),
                codec="none" if as_it_is or uncoded else self._weights_codec(name),
            )
            for name, traffic in sent
        )

    def _encoded(self, name: str, shard: Tensor) -> int:
        """Elements of the weights that are encoded for a hop: the shard, and only for the first.

        With differences, the node shard is decoded after that, brought up to date, and encoded again."""
        if not self._is_second(name):
            return shard.numel()
        encodes_again = self._sends_differences and self._config.delta_in_node != "bf16"
        return len(self._topology.nodes) * shard.numel() if encodes_again else 0

    def _decoded(self, name: str, is_last: bool, ranks: int, shard: Tensor) -> int:
        if is_last:
            return ranks * shard.numel()
        return len(self._topology.nodes) * shard.numel() if self._sends_differences else 0

    def _weights_codec(self, name: str) -> str:
        if not self._sends_differences:
            return self._config.weights
        return self._config.delta_in_node if name == "in-node" else "int4"

    @property
    def _sends_differences(self) -> bool:
        return self._config.weights == "delta-int4"

    def _reduce_hops(self, gradients: Tensor) -> tuple[Hop, ...]:
        """Full `gradients` [W * S] became a shard [S]."""
        hops = []
        for name, traffic in self._sent():
            codec = self._config.gradients_in_node if name == "in-node" else self._config.gradients_across
            if gradients.dtype not in QUANTIZABLE_DTYPES:
                codec = "none"
            uncoded = name == "flat" and codec == "none"
            is_ring = name == "flat" and codec in ("none", "bf16")
            collective: Collective = "reduce_scatter" if is_ring else "all_to_all"
            ranks = self._size(name, self._topology.size)
            # The second hop starts from the node slice, which has one row per node.
            numel = gradients.numel() // (self._topology.size // ranks if name == "across" else 1)
            encoded = 0 if uncoded else numel
            decoded = numel // ranks if is_ring else numel  # a ring has summed up what it brings
            hops.append(
                Hop(
                    self._level(name), collective, ranks, traffic.wire_bytes, traffic.across_bytes,
                    traffic.calls, encoded=encoded, decoded=0 if uncoded else decoded, codec=codec,
                )
            )  # fmt: skip
        return tuple(hops)

    def _counters(self) -> dict[tuple[Counted, str], Traffic]:
        rows = self._ledger.rows()
        return {(key.collective, key.hop): copy(traffic) for key, traffic in rows if key.unit == self._unit}

    def _sent(self) -> list[tuple[str, Traffic]]:
        """By hop, in the order of the hops: what was sent since `start`."""
        sent = []
        for (collective, name), now in self._counters().items():
            before = self._before.get((collective, name), Traffic())
            if now.calls > before.calls:
                more = Traffic(
                    now.calls - before.calls,
                    now.wire_bytes - before.wire_bytes,
                    now.across_bytes - before.across_bytes,
                )
                sent.append((name, more))
        return sent

    def _is_second(self, name: str) -> bool:
        return name == "in-node" and not self._topology.is_one_node

    def _size(self, name: str, ranks: int) -> int:
        nodes = len(self._topology.nodes)
        return {"across": nodes, "in-node": self._topology.size // nodes}.get(name, ranks)

    def _level(self, name: str) -> Level:
        """Of the links, whatever the route: a flat ring inside a node is in-node."""
        if name == "in-node" or name == "post-forward" or self._topology.is_one_node:
            return "in-node"
        return "across" if name == "across" or len(self._topology.columns) == 1 else "flat"


def all_reduce_hop(gradients: Tensor, ranks: int) -> Hop:
    """HSDP's ring over replicas, which is FSDP2's own and not in the ledger.

    >>> all_reduce_hop(torch.zeros(10), ranks=4).wire_bytes
    72
    """
    piece = -(-gradients.numel() // ranks) * gradients.itemsize
    sent = 2 * (ranks - 1) * piece
    return Hop("across", "all_reduce", ranks, sent, sent, chunks=1, encoded=0, decoded=0, codec="none")
