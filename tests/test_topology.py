from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import Ranks
from zeropp.topology import Topology

CLONE_NEWUTS = 0x04000000


@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_rows_of_a_rail_are_adjacent_for_any_assignment(
    data: st.DataObject, nodes: int, per_node: int
) -> None:
    size = nodes * per_node
    ranks = data.draw(st.permutations(range(size)))
    labels = data.draw(st.permutations([node for node in range(nodes) for _ in range(per_node)]))
    numbering = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    layout = Topology(tuple(ranks), tuple(numbering[label] for label in labels), rank=0)
    assert layout.is_even
    assert sorted(layout.row_order) == list(range(size))
    for rail in layout.rails:
        assert sorted(layout.node_of[p] for p in rail) == list(range(nodes))  # one of each node
        members = [layout.ranks[p] for p in rail]
        assert members == sorted(members)  # as a process group orders them
    assert [p for rail in layout.rails for p in rail] == list(layout.row_order)


def test_a_layout_is_described() -> None:
    assert Topology((0, 1, 2, 3), (0, 0, 1, 1), 0).describe() == "2 nodes x 2 ranks"
    assert Topology((0, 1), (0, 1), 0).describe() == "2 nodes x 1 rank"
    assert Topology((0, 1, 2), (0, 0, 1), 0).describe() == "node 0: ranks [0, 1]; node 1: ranks [2]"


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _nodes(node_size: Any) -> Any:
    return Topology.of(world(), node_size).nodes


def test_node_size_and_local_world_size(ranks: Ranks) -> None:
    two_by_two = ((0, 1), (2, 3))
    assert ranks.run(_nodes, 2) == [two_by_two] * 4
    assert ranks.run(_nodes, "auto", env={"LOCAL_WORLD_SIZE": "2"}) == [two_by_two] * 4
    assert ranks.run(_nodes, 2, env={"LOCAL_WORLD_SIZE": "4"}) == [two_by_two] * 4  # what is said counts
    # All ranks are on this one host; a size that does not divide the world is no size of a node.
    for env in ({}, {"LOCAL_WORLD_SIZE": "3"}):
        assert ranks.run(_nodes, "auto", env=env) == [((0, 1, 2, 3),)] * 4


def _nodes_with_sizes_of_their_own() -> Any:
    os.environ["LOCAL_WORLD_SIZE"] = str(1 + dist.get_rank() % 2)
    try:
        return Topology.of(world(), "auto").nodes
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def test_ranks_that_disagree_on_local_world_size_decide_alike(ranks: Ranks) -> None:
    assert ranks.run(_nodes_with_sizes_of_their_own) == [((0, 1, 2, 3),)] * 4


def _nodes_on_hosts(hosts: list[str], local_world_size: int) -> Any:
    """Give this rank a host name of its own, in a namespace of its own, for a moment."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/uts") as home:
        if libc.unshare(CLONE_NEWUTS):
            return os.strerror(ctypes.get_errno())
        try:
            name = hosts[dist.get_rank()].encode()
            libc.sethostname(name, len(name))
            if local_world_size:
                os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
            layout = Topology.of(world(), "auto")
            try:
                layout.hops()
            except ValueError as error:
                return str(error)
            return layout.nodes
        finally:
            os.environ.pop("LOCAL_WORLD_SIZE", None)
            libc.setns(home.fileno(), CLONE_NEWUTS)


@pytest.mark.parametrize(
    ("hosts", "local_world_size", "expected"),
    [
        ("aabb", 0, ((0, 1), (2, 3))),
        ("abab", 0, ((0, 2), (1, 3))),
        ("abba", 0, ((0, 3), (1, 2))),
        ("aaaa", 2, ((0, 1), (2, 3))),  # a lab: two nodes on one host
        ("abab", 2, ((0, 2), (1, 3))),  # LOCAL_WORLD_SIZE would put two hosts on one node
        ("aaab", 0, "spread unevenly over nodes (node 0: ranks [0, 1, 2]; node 1: ranks [3])"),
    ],
)
def test_nodes_by_host_name(ranks: Ranks, hosts: str, local_world_size: int, expected: Any) -> None:
    results = ranks.run(_nodes_on_hosts, list(hosts), local_world_size)
    if "not permitted" in str(results[0]):
        pytest.skip("needs the right to make a UTS namespace")
    if isinstance(expected, str):
        assert all(expected in message for message in results)
    else:
        assert results == [expected] * 4


def _hop_sums() -> Any:
    """What the two hop groups connect: sum the ranks over each."""
    across, in_node = Topology.of(world(), 2).hops()
    assert Topology.of(world(), 2).hops() == (across, in_node)  # made once
    sums = []
    for hop in (across, in_node):
        value = torch.tensor(10 ** dist.get_rank())
        dist.all_reduce(value, group=hop.group)
        sums.append((hop.name, hop.size, value.item()))
    return sums


def test_hop_groups_connect_rails_and_nodes(ranks: Ranks) -> None:
    results = ranks.run(_hop_sums, world=6)
    assert results[0] == [("across", 3, 10101), ("in-node", 2, 11)]
    assert results[5] == [("across", 3, 101010), ("in-node", 2, 110000)]


def _timeouts() -> set[float]:
    return {
        hop.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for hop in Topology.of(world(), 2).hops()
        if hop.group is not None
    }


def test_hop_groups_have_the_timeout_of_the_job(ranks: Ranks) -> None:
    assert ranks.run(_timeouts, timeout=77.0) == [{77.0}] * 4


def _changed_timeouts() -> tuple[set[float], set[float]]:
    """Timeouts of two hops, and of the only one of a single node, whose group is not ours."""
    for hop in Topology.of(world(), 2).hops():
        hop.set_timeout(timedelta(seconds=55))
    (only,) = Topology.of(world(), 4).hops()
    only.set_timeout(timedelta(seconds=44))
    whole = world()._get_backend(torch.device("cpu")).options._timeout
    return _timeouts(), {whole.total_seconds()}


def test_a_timeout_can_be_changed(ranks: Ranks) -> None:
    assert ranks.run(_changed_timeouts, timeout=77.0) == [({55.0}, {77.0})] * 4


def _collapsed() -> Any:
    return [[(hop.name, hop.size, hop.group) for hop in Topology.of(world(), size).hops()] for size in (1, 4)]


def test_one_node_or_one_rank_a_node_needs_one_hop_and_no_new_group(ranks: Ranks) -> None:
    assert ranks.run(_collapsed) == [[[("across", 4, None)], [("in-node", 4, None)]]] * 4


def _two_dimensional() -> Any:
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    group = mesh["dp"].get_group()
    layout = Topology.of(group, 2)
    value = torch.tensor(10 ** dist.get_rank())
    for hop in layout.hops():
        dist.all_reduce(value, group=hop.group or group)
    return layout.ranks, layout.describe(), value.item()


def test_sub_groups_of_a_mesh(ranks: Ranks) -> None:
    results = ranks.run(_two_dimensional, world=6)
    assert results[0] == ((0, 2, 4), "3 nodes x 1 rank", 10101)
    assert results[3] == ((1, 3, 5), "3 nodes x 1 rank", 101010)


def _undividing() -> str:
    with pytest.raises(ValueError, match="node_size") as error:
        Topology.of(world(), 3)
    return str(error.value)


def test_a_node_size_that_does_not_divide(ranks: Ranks) -> None:
    expected = "Config.node_size is 3, which does not divide the 4 ranks of this job"
    assert all(expected in message for message in ranks.run(_undividing))
