"""FSDP2 with zeropp on a device with streams: it computes what the CPU computes, in an order that only events
and waits give, and never makes the host wait."""

from __future__ import annotations

from dataclasses import asdict

import pytest

import zeropp
from tests.configs import CONFIGS
from tests.ranks import Ranks
from tests.streamed import device
from tests.streamed.jobs import (
    change_weights_in_silence,
    gather_beside,
    gather_in_a_graph,
    gather_on_two_streams,
    search,
    train,
    unshard_ahead,
)

ALL = CONFIGS | {
    "wire16": zeropp.Config.wire16(node_size=2),
    "off": zeropp.Config.off(node_size=2),
}


@pytest.mark.parametrize("name", ALL)
def test_trains_as_on_cpu(streamed_ranks: Ranks, name: str) -> None:
    config = asdict(ALL[name])
    on_cpu = streamed_ranks.run(train, "cpu", config)
    outcomes = streamed_ranks.run(train, device.NAME, config)
    for outcome in outcomes:
        assert outcome.conflicts == []
        assert outcome.synchronizations == []
    if name == "wire16":  # the backend's own reduce-scatter of bf16 sums in another order than the CPU's ring
        assert outcomes[0].losses == pytest.approx(on_cpu[0].losses, rel=1e-3)
    else:
        assert [outcome.losses for outcome in outcomes] == [outcome.losses for outcome in on_cpu]


def test_a_config_that_chooses_itself(streamed_ranks: Ranks) -> None:
    """On streams FSDP2 overlaps by itself. The host waits once in each step of the search, for the clock, and
    for what the ranks agree on; and for nothing afterwards."""
    results = streamed_ranks.run(search, device.NAME, env={"LOCAL_WORLD_SIZE": "2"})
    for candidates, chosen, searching, after in results:
        assert candidates == ["plain FSDP2", "node shard", "default"]
        assert chosen == results[0][1] is not None
        assert searching.conflicts == after.conflicts == []
        assert len(searching.losses) <= len(searching.synchronizations) <= len(searching.losses) + 4
        assert after.synchronizations == []
        assert len(after.losses) == 2


def test_a_node_shard_is_used_on_any_stream(streamed_ranks: Ranks) -> None:
    for outcome in streamed_ranks.run(gather_on_two_streams):
        assert outcome.conflicts == []
        assert len(set(outcome.losses)) == 1


def test_an_asynchronous_gather_runs_beside_the_current_stream(streamed_ranks: Ranks) -> None:
    """Who waits has the weights; who does not was not held up: to the device, a conflict."""
    for outcome in streamed_ranks.run(gather_beside):
        assert outcome.conflicts == []
        assert outcome.synchronizations == []
        assert len(set(outcome.losses)) == 1
    for outcome in streamed_ranks.run(gather_beside, "zeropp", None, False):
        assert any("not ordered after" in conflict for conflict in outcome.conflicts), outcome.conflicts


def test_stale_weights_are_an_error(streamed_ranks: Ranks) -> None:
    for error in streamed_ranks.run(change_weights_in_silence):
        assert error.startswith("StaleWeightsError"), error


def test_a_gather_in_a_graph_is_refused(streamed_ranks: Ranks) -> None:
    for error in streamed_ranks.run(gather_in_a_graph):
        assert "while a graph of streamed is being captured" in error


def test_unshard_ahead_of_time(streamed_ranks: Ranks) -> None:
    for outcome in streamed_ranks.run(unshard_ahead):
        assert outcome.conflicts == []
        assert outcome.synchronizations == []
        assert len(set(outcome.losses)) == 1
