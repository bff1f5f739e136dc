"""The nodes of a shard group, and the process groups of the two hops.

A shard group has W = N x n ranks on N nodes with n ranks each. The k-th ranks of all nodes, in order of rank,
form a *rail* (rail-optimized networks have a separate switch for each). The two hops of every collective run
inside a node and along a rail:

                rail 0   rail 1
    node 0        r0       r1        <- in-node group
    node 1        r2       r3
                   ^
                   across group

[Note: Row order]
A buffer has W rows, one for each rank of the shard group. `Topology.row_order` sorts them by rail, then by
rank. The rows of one rail are then adjacent, in the order of the across group's ranks (process groups sort
their members). The permutation is the paper's slice reordering, for any assignment of ranks to nodes. For
ranks numbered node by node it is [node, local] -> [local, node].

[Note: Same branch on every rank]
The layout depends only on `node_size`, or on data that all ranks of the group have exchanged. So every rank
computes the same layout, raises the same error, and creates the same groups in the same order.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ._text import count
from .process_groups import group_of, set_timeout, timeout_of, world

HopName = Literal["in-node", "across", "flat"]


@dataclass(frozen=True)
class Hop:
    """One hop of a collective: its name in the ledger, and its ranks."""

    name: HopName
    size: int
    group: ProcessGroup | None
    """None: the process group that FSDP2 passes to the collective."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long this rank waits in the hop, if zeropp made its group."""
        if self.group is not None:
            set_timeout(self.group, timeout)

    def wait_for(self, message: dist.Work) -> None:
        """Wait for a message between two ranks of the hop. Without an explicit timeout, gloo would use the
        timeout with which the group was created."""
        message.wait() if self.group is None else message.wait(timeout_of(self.group))


@dataclass(frozen=True)
class Topology:
    """The nodes of one shard group. Create it with `Topology.of`.

    >>> layout = Topology(ranks=(0, 1, 2, 3), node_of=(0, 0, 1, 1), rank=0)
    >>> layout.nodes, layout.rails, layout.row_order
    (((0, 1), (2, 3)), ((0, 2), (1, 3)), (0, 2, 1, 3))
    """

    ranks: tuple[int, ...]
    """Global ranks of the shard group, in the order of the group."""

    node_of: tuple[int, ...]
    """Node of each rank of `ranks`; nodes are numbered in order of appearance."""

    rank: int
    """Position of this process in `ranks`. All tuples below hold positions, too."""

    @classmethod
    def of(cls, group: ProcessGroup, node_size: int | Literal["auto"]) -> Topology:
        """Return the layout of `group`. With "auto", this is a collective on the group, once per set of
        ranks."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if node_size == "auto":
            cache = _layouts.setdefault(world(), {})
            if ranks not in cache:
                cache[ranks] = _discover_nodes(group, ranks)
            labels = cache[ranks]
        else:
            world_size = dist.get_world_size()
            if world_size % node_size:
                raise ValueError(
                    f"Config.node_size is {node_size}, which does not divide the {world_size} ranks of this "
                    "job; expected the number of ranks on each node, or 'auto'"
                )
            labels = tuple(str(rank // node_size) for rank in ranks)
        # dict.fromkeys keeps the order of appearance.
        numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
        return cls(
            ranks, tuple(numbers[label] for label in labels), dist.get_group_rank(group, dist.get_rank())
        )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """[N][n] positions in the group by node; inside a node in order of global rank."""
        by_rank = sorted(range(self.size), key=self.ranks.__getitem__)
        return tuple(
            tuple(p for p in by_rank if self.node_of[p] == node) for node in range(max(self.node_of) + 1)
        )

    @property
    def rails(self) -> tuple[tuple[int, ...], ...]:
        """[n][N] positions in the group by rail; inside a rail in order of global rank."""
        return tuple(
            tuple(sorted(rail, key=self.ranks.__getitem__)) for rail in zip(*self.nodes, strict=True)
        )

    @property
    def row_order(self) -> tuple[int, ...]:
        """Positions in the group, sorted by rail, then by rank: [Note: Row order]."""
        return tuple(position for rail in self.rails for position in rail)

    @property
    def ring(self) -> tuple[int, ...]:
        """Positions in the group, node by node. A ring in this order leaves each node once."""
        return tuple(position for node in self.nodes for position in node)

    @property
    def is_one_node(self) -> bool:
        """Whether all ranks are on one node."""
        return len(set(self.node_of)) == 1

    @property
    def is_even(self) -> bool:
        """Whether all nodes have the same number of ranks."""
        return len({len(node) for node in self.nodes}) == 1

    def describe(self) -> str:
        """Return one line for messages: `2 nodes x 2 ranks`, or the whole layout if nodes are uneven."""
        if self.is_even:
            return f"{count(len(self.nodes), 'node')} x {count(len(self.nodes[0]), 'rank')}"
        return "; ".join(
            f"node {number}: ranks {[self.ranks[p] for p in node]}" for number, node in enumerate(self.nodes)
        )

    def hops(self, direction: str = "", *, own_groups: bool = False) -> tuple[Hop, ...]:
        """Return the hops of a gather, (across, in-node), or the only hop of this layout. Collective.

        A reduction uses them in reverse. Groups are created once and shared by all units: see
        process_groups.py. Each `direction` has separate groups, so gathers and reductions do not queue behind
        each other. An only hop uses the group that FSDP2 passes, unless `own_groups`.
        """
        if not self.is_even:
            raise ValueError(
                f"the ranks of this shard group are spread unevenly over nodes ({self.describe()}); two hops "
                "need the same number on each: set Config.node_size, shard over a mesh that takes the same "
                "number of ranks from each node, or use route='flat'"
            )
        if self.is_one_node or len(self.rails) == 1:
            name: HopName = "in-node" if self.is_one_node else "across"
            return (Hop(name, self.size, self._everyone(direction) if own_groups else None),)
        # All ranks create in-node groups first. Otherwise two ranks could wait for each other in two groups.
        in_node = group_of(self._members(self.nodes), f"zeropp_in_node{direction}")
        across = group_of(self._members(self.rails), f"zeropp_across{direction}")
        return Hop("across", len(self.nodes), across), Hop("in-node", len(self.rails), in_node)

    def flat_hop(self, direction: str = "", *, own_groups: bool = False) -> Hop:
        """Return the hop of a flat route: one over all ranks. Collective with `own_groups`."""
        return Hop("flat", self.size, self._everyone(direction) if own_groups else None)

    def _everyone(self, direction: str) -> ProcessGroup:
        return group_of(self.ranks, f"zeropp_all{direction}")

    def _members(self, groups: Sequence[Sequence[int]]) -> list[int]:
        """Return the global ranks of this process's group among `groups`."""
        (mine,) = (members for members in groups if self.rank in members)
        return [self.ranks[position] for position in mine]


# The key is the default group, so entries do not outlive `destroy_process_group`.
_layouts: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], tuple[str, ...]]] = WeakKeyDictionary()


def _discover_nodes(group: ProcessGroup, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Return a label of the node of each rank.

    Nodes follow from LOCAL_WORLD_SIZE if it is the same on all ranks and puts no two hosts on one node.
    Otherwise a node is a host name. Two nodes on one host are valid: a lab of network namespaces.
    """
    mine = (socket.gethostname(), int(os.environ.get("LOCAL_WORLD_SIZE", 0)))
    everyone: list[tuple[str, int]] = [mine] * len(ranks)
    dist.all_gather_object(everyone, mine, group=group)
    hosts = tuple(host for host, _ in everyone)
    (local_world_size, *others) = {size for _, size in everyone}
    # `others`: ranks have different sizes.
    if local_world_size > 0 and not others and dist.get_world_size() % local_world_size == 0:
        labels = tuple(str(rank // local_world_size) for rank in ranks)
        if len(set(zip(labels, hosts, strict=True))) == len(set(labels)):  # one host per label
            return labels
    return hosts
