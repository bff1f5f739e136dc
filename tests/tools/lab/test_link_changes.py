from __future__ import annotations

import time

import pytest

from zeropp.tools.lab import Change, Cluster, Schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1 down", "it has no time, node or action"),
        ("5s switch down", "it has no time, node or action"),
        ("soon node1 down", "time is 'soon'"),
        ("5s node1 sideways", "'sideways' is not up, down"),
        ("5s node1 speed=1gbit", "'speed=1gbit' is not up, down"),
        ("5s all link=1gbit down", "is not up, down"),
        ("5s all loss=2", "loss is '2'"),
    ],
)
def test_invalid_changes_are_named(text: str, message: str) -> None:
    expected = f"change of a link is '{text}' .*{message}.*; expected a time, a node"
    with pytest.raises(ValueError, match=expected):
        Change.parse(text)


def test_changes_happen_in_order_of_time() -> None:
    changes = [Change.parse("200ms all link=30mbit"), Change.parse("0s node1 link=20mbit loss=1%")]
    seen: list[str] = []
    with Cluster(nodes=2, ranks_per_node=1) as cluster:

        def see(change: Change) -> None:
            seen.append(
                f"{change} -> {cluster.links[0].link} {cluster.links[1].link} {cluster.links[1].loss}"
            )

        schedule = Schedule(cluster, changes, see)
        schedule.start()
        while len(seen) < 2:
            time.sleep(0.01)
        schedule.stop()
    assert seen == [
        "link of node 1: link=20mbit loss=1% -> 1gbit 20mbit 1%",
        "all links: link=30mbit -> 30mbit 30mbit 1%",
    ]


def test_a_change_for_a_missing_node_is_refused() -> None:
    with Cluster(nodes=2, ranks_per_node=1) as cluster, pytest.raises(ValueError, match="for node 2"):
        Schedule(cluster, [Change.parse("1s node2 down")], print)
