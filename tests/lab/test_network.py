"""The network itself, with plain TCP: rates, counters, delay, loss, unplugged links."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zeropp.lab import Cluster, LinkCounters

from .traffic import transfer


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=3, ranks_per_node=1, link="200mbit") as cluster:
        yield cluster


def moved(cluster: Cluster, before: list[LinkCounters]) -> list[LinkCounters]:
    return [now.since(then) for now, then in zip(cluster.counters(), before, strict=True)]


def quickest(cluster: Cluster, source: int, target: int, nbytes: int) -> float:
    """Seconds of the quickest of several transfers. None is faster than the link, and a machine with other
    things to do makes some of them slower."""
    return min(float(transfer(cluster, source, target, nbytes)["seconds"]) for _ in range(3))


@pytest.mark.parametrize("link", ["200mbit", "50mbit"])
def test_rate_of_a_link_is_what_was_asked_for(cluster: Cluster, link: str) -> None:
    """Measured with 3 MB: no burst that would hide the rate, no headers beyond 5%."""
    rate_bit_s = {"200mbit": 200e6, "50mbit": 50e6}[link]
    cluster.set_link(link=link)
    nbytes = 3_000_000
    assert nbytes * 8 / quickest(cluster, 1, 0, nbytes) == pytest.approx(rate_bit_s, rel=0.05)


def test_links_are_shaped_one_by_one(cluster: Cluster) -> None:
    cluster.set_link(link="200mbit")
    cluster.set_link(2, link="20mbit")
    slow, fast = transfer(cluster, 0, 2, 1_000_000)["seconds"], quickest(cluster, 0, 1, 1_000_000)
    assert slow > 5 * fast  # into node 2: the switch shapes, too
    assert [link.link for link in cluster.links] == ["200mbit", "200mbit", "20mbit"]
    cluster.set_link(link="200mbit")


def test_counters_see_what_crossed_and_on_which_link(cluster: Cluster) -> None:
    before = cluster.counters()
    transfer(cluster, 1, 0, 3_000_000)
    links = moved(cluster, before)
    assert links[1].tx_bytes == pytest.approx(3_000_000, rel=0.03)
    assert links[0].rx_bytes == pytest.approx(3_000_000, rel=0.03)
    assert links[0].tx_bytes < 100_000  # acknowledgements
    assert links[2].tx_bytes < 10_000


def test_traffic_inside_a_node_is_not_on_its_link(cluster: Cluster) -> None:
    before = cluster.counters()
    transfer(cluster, 1, 1, 3_000_000)
    assert moved(cluster, before)[1].tx_bytes < 10_000


def test_delay_is_one_way(cluster: Cluster) -> None:
    """The quickest of several: a machine with other things to do makes some of them late."""

    def connect_seconds() -> float:
        return min(transfer(cluster, 0, 1, 1000)["connect_seconds"] for _ in range(4))

    without = connect_seconds()
    cluster.set_link(delay="30ms")
    assert connect_seconds() - without == pytest.approx(0.06, abs=0.03)
    cluster.set_link(delay="0ms")
    assert connect_seconds() < 0.05


def test_lost_packets_are_sent_again(cluster: Cluster) -> None:
    cluster.set_link(0, loss="5%")
    before = cluster.counters()
    got = transfer(cluster, 0, 1, 5_000_000)
    sent = moved(cluster, before)[0].tx_bytes
    cluster.set_link(0, loss="0%")
    assert got["bytes"] == 5_000_000
    assert sent > 1.03 * got["bytes"]


def test_an_unplugged_node_is_cut_off_and_its_ranks_still_reach_each_other(cluster: Cluster) -> None:
    cluster.link_down(1)
    assert transfer(cluster, 1, 1, 1000)["bytes"] == 1000
    before = cluster.counters()
    assert transfer(cluster, 0, 2, 1000)["bytes"] == 1000
    assert moved(cluster, before)[1].rx_bytes == 0
    cluster.link_up(1)
    assert transfer(cluster, 0, 1, 1000)["bytes"] == 1000
