from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks
from zeropp.tools.doctor.hardware import Size, _fit, measure
from zeropp.tools.plan.hardware import Hardware
from zeropp.topology import Topology

SMALL = Size(2, 8, 64, wire_bytes=(1 << 12, 1 << 14), repeats=1)


def summary(node_size: int) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    found = measure(SMALL, torch.device("cpu"), Topology.of(group, node_size))
    hardware = found.hardware
    return {
        "points": {name: [sent for sent, _ in points] for name, points in found.points.items()},
        "seconds": [seconds for points in found.points.values() for _, seconds in points],
        "numbers": (hardware.peak_tflops, hardware.memory_gbyte_s, hardware.host_ns_per_byte),
        "core_wait_us": hardware.core_wait_us,
        "hardware": hardware,
        "one_rank_gbit_s": found.one_rank_gbit_s,
    }


def test_four_ranks_measure_every_hop_and_agree(ranks: Ranks) -> None:
    found = ranks.run(summary, 2)
    first, hardware = found[0], found[0]["hardware"]
    assert all(other["numbers"] == first["numbers"] for other in found)
    assert set(hardware.measured) == {
        "all_gather in-node", "all_to_all in-node", "all_gather in-node plain", "reduce_scatter in-node",
        "all_gather across", "all_to_all across", "all_reduce across",
        "all_gather flat", "all_to_all flat", "all_gather flat plain", "reduce_scatter flat",
        "reduce_scatter flat plain",
    }  # fmt: skip
    assert first["points"]["all_gather across"] == [1 << 12, 1 << 14]
    assert first["points"]["all_to_all flat"] == [3 * ((1 << 12) // 3), 3 * ((1 << 14) // 3)]
    assert first["points"]["all_reduce across"] == [1 << 12, 1 << 14]
    assert all(seconds > 0 for seconds in first["seconds"])
    assert all(number > 0 for number in first["numbers"])
    assert {other["core_wait_us"] for other in found} == {first["core_wait_us"]}
    assert first["core_wait_us"] >= 0
    assert first["one_rank_gbit_s"] > 0
    assert set(hardware.codecs) == {"none", "bf16", "int8", "int4"}
    assert "zeropp doctor: 2 nodes x 2 ranks, gloo" in hardware.source
    assert (hardware.overlap, hardware.ranks_per_node) == (False, 2)
    assert min(hardware.link_gbit_s, hardware.in_node_gbyte_s) > 0


def test_links_that_were_not_measured_are_none(ranks: Ranks, tmp_path: Path) -> None:
    """One node has no link to others, and nodes of one rank have no link inside."""
    (one_node, _), (one_rank, _) = (ranks.run(summary, size, world=2) for size in (2, 1))
    assert {name.split()[1] for name in one_node["hardware"].measured} == {"in-node"}
    assert one_node["one_rank_gbit_s"] is None
    assert (one_node["hardware"].link_gbit_s, one_node["hardware"].link_latency_us) == (None, None)
    assert one_node["hardware"].in_node_gbyte_s > 0
    assert {name.split()[1] for name in one_rank["hardware"].measured} == {"across"}
    assert (one_rank["hardware"].in_node_gbyte_s, one_rank["hardware"].in_node_latency_us) == (None, None)
    path = tmp_path / "hardware.json"
    one_node["hardware"].save(path)
    assert Hardware.load(path) == one_node["hardware"]


@pytest.mark.parametrize(("latency", "rate"), [(0.0, 2.0), (50.0, 0.1), (1000.0, 40.0)])
def test_the_fit_finds_latency_and_rate(latency: float, rate: float) -> None:
    points = [(sent, latency * 1e-6 + sent * rate * 1e-9) for sent in (1 << 16, 1 << 18, 1 << 20)]
    cost = _fit(points)
    assert cost.latency_us == pytest.approx(latency, abs=1e-2)
    assert cost.ns_per_byte == pytest.approx(rate, rel=1e-3)


def test_a_fit_is_never_negative() -> None:
    cost = _fit([(1000, 5e-6), (2000, 4e-6)])
    assert cost.latency_us == pytest.approx(4.4, abs=0.1)
    assert cost.ns_per_byte == 0.0
    assert _fit([(1000, 1e-6)]).ns_per_byte == pytest.approx(1.0)
