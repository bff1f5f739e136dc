"""The network, tested with plain TCP: rates, counters, delay, loss, disconnected links."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.tools.lab.traffic import Transfer, transfer
from zeropp.tools.lab import Cluster, LinkCounters


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=3, ranks_per_node=1, link="200mbit") as cluster:
        yield cluster


def moved(cluster: Cluster, before: list[LinkCounters]) -> list[LinkCounters]:
    return [now.since(then) for now, then in zip(cluster.counters(), before, strict=True)]


def tbf_bit_s(cluster: Cluster, node: int) -> int:
    """Return the kernel's rate for packets that leave a node."""
    code = """
from pyroute2 import IPRoute
with IPRoute() as here:
    (tbf,) = [q for q in here.get_qdiscs() if q.get_attr("TCA_KIND") == "tbf"]
    print(tbf.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"])
"""
    command = cluster.inside(node, [sys.executable, "-c", code])
    return 8 * int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout)


@pytest.mark.parametrize("link", ["200mbit", "50mbit"])
def test_a_link_has_the_given_rate(cluster: Cluster, link: str) -> None:
    """A transfer takes at least as long as the rate allows, and longer on a busy machine. The kernel's own
    figure shows that the rate is not lower."""
    rate_bit_s = {"200mbit": 200e6, "50mbit": 50e6}[link]
    cluster.set_link(link=link)
    nbytes, bucket_bytes = 3_000_000, 32 * 1024
    assert transfer(cluster, 1, 0, nbytes)["seconds"] > (nbytes - bucket_bytes) * 8 / rate_bit_s
    assert tbf_bit_s(cluster, 1) == rate_bit_s


def test_links_are_shaped_one_by_one(cluster: Cluster) -> None:
    """The switch shapes, too: a transfer into node 2 takes minutes. One into node 1 ends before it."""
    cluster.set_link(link="200mbit")
    cluster.set_link(2, link="10kbit")
    with Transfer(cluster, 0, 2, 1_000_000) as slow:
        assert transfer(cluster, 0, 1, 1_000_000)["bytes"] == 1_000_000
        assert not slow.is_done()
    assert [link.link for link in cluster.links] == ["200mbit", "200mbit", "10kbit"]
    cluster.set_link(link="200mbit")


def test_counters_have_the_bytes_of_each_link(cluster: Cluster) -> None:
    before = cluster.counters()
    transfer(cluster, 1, 0, 3_000_000)
    links = moved(cluster, before)
    for nbytes in (links[1].tx_bytes, links[0].rx_bytes):
        assert 3_000_000 < nbytes < 3_300_000  # headers, and what TCP sends again if an answer is late
    assert links[0].tx_bytes < 100_000  # acknowledgements
    assert links[2].tx_bytes < 10_000


def test_traffic_inside_a_node_is_not_on_its_link(cluster: Cluster) -> None:
    before = cluster.counters()
    transfer(cluster, 1, 1, 3_000_000)
    assert moved(cluster, before)[1].tx_bytes < 10_000


def test_delay_is_that_of_each_way(cluster: Cluster) -> None:
    """A connection needs a packet in each direction. test_relay.py tests that packets into a node do not
    wait."""

    def connect_seconds() -> float:
        return transfer(cluster, 0, 1, 1000)["connect_seconds"]

    cluster.set_link(0, delay="30ms")
    assert connect_seconds() >= 0.03
    cluster.set_link(delay="30ms")
    assert connect_seconds() >= 0.06
    cluster.set_link(delay="10s")
    cluster.set_link(delay="0ms")
    assert connect_seconds() < 10


def test_tcp_resends_lost_packets(cluster: Cluster) -> None:
    cluster.set_link(0, loss="10%")
    before = cluster.counters()
    got = transfer(cluster, 0, 1, 5_000_000)
    sent = moved(cluster, before)[0].tx_bytes
    cluster.set_link(0, loss="0%")
    assert got["bytes"] == 5_000_000
    assert sent > 1.03 * got["bytes"]  # of ten percent; headers are less than one


def test_an_unplugged_node_is_cut_off_and_its_ranks_still_reach_each_other(cluster: Cluster) -> None:
    cluster.link_down(1)
    assert transfer(cluster, 1, 1, 1000)["bytes"] == 1000
    before = cluster.counters()
    assert transfer(cluster, 0, 2, 1000)["bytes"] == 1000
    assert moved(cluster, before)[1].rx_bytes == 0
    cluster.link_up(1)
    assert transfer(cluster, 0, 1, 1000)["bytes"] == 1000
