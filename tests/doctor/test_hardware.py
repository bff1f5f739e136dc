from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import Ranks
from zeropp import measure as measuring
from zeropp.measure import Size, measure

SMALL = Size(2, 8, 64, wire_bytes=(1 << 12, 1 << 14), repeats=1)


def summary() -> dict[str, Any]:
    said: list[str] = []
    found = measure(SMALL, said.append)
    assert said == ["memory", "layers", "codecs", *found.points]
    hardware = found.hardware
    return {
        "points": {name: [sent for sent, _ in points] for name, points in found.points.items()},
        "seconds": [seconds for points in found.points.values() for _, seconds in points],
        "measured": set(hardware.measured),
        "codecs": set(hardware.codecs),
        "numbers": (hardware.peak_tflops, hardware.memory_gbyte_s, hardware.host_ns_per_byte),
        "source": hardware.source,
        "overlap": hardware.overlap,
        "ranks_per_node": hardware.ranks_per_node,
        "one_rank_gbit_s": found.one_rank_gbit_s,
        "world": dist.get_world_size(),
    }


def test_four_ranks_measure_every_hop_and_agree(ranks: Ranks) -> None:
    found = ranks.run(summary, world=4, env={"LOCAL_WORLD_SIZE": "2"}, timeout=90)
    first = found[0]
    assert all(other["numbers"] == first["numbers"] for other in found)
    assert first["measured"] == {
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
    assert first["one_rank_gbit_s"] > 0
    assert first["codecs"] == {"none", "bf16", "int8", "int4"}
    assert "2 nodes x 2 ranks, gloo" in first["source"]
    assert (first["overlap"], first["ranks_per_node"]) == (False, 2)


def test_one_node_has_no_link_across(ranks: Ranks) -> None:
    (first, _) = ranks.run(summary, world=2, env={"LOCAL_WORLD_SIZE": "2"}, timeout=90)
    assert {name.split()[1] for name in first["measured"]} == {"in-node"}
    assert first["one_rank_gbit_s"] is None


@pytest.mark.parametrize(("latency", "rate"), [(0.0, 2.0), (50.0, 0.1), (1000.0, 40.0)])
def test_the_fit_finds_latency_and_rate(latency: float, rate: float) -> None:
    points = [(sent, latency * 1e-6 + sent * rate * 1e-9) for sent in (1 << 16, 1 << 18, 1 << 20)]
    cost = measuring._fit(points)
    assert cost.latency_us == pytest.approx(latency, abs=1e-2)
    assert cost.ns_per_byte == pytest.approx(rate, rel=1e-3)


def test_a_fit_is_never_negative() -> None:
    cost = measuring._fit([(1000, 5e-6), (2000, 4e-6)])
    assert cost.latency_us == pytest.approx(4.4, abs=0.1)
    assert cost.ns_per_byte == 0.0
    assert measuring._fit([(1000, 1e-6)]).ns_per_byte == pytest.approx(1.0)
