from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tools.plan.samples import flat_trace, two_hop_trace
from zeropp.tools.plan.catalog import find_hardware
from zeropp.tools.plan.memory_estimate import MemoryEstimate
from zeropp.tools.plan.recommend import (
    COMPARED,
    SAME_SPEED,
    find_compared,
    rank,
    recommend,
    sensible_strategies,
    slowest_link_as_fast,
)
from zeropp.tools.plan.timeline import simulate
from zeropp.tools.plan.trace import Compute, Trace
from zeropp.tools.strategies import Strategy

A100 = find_hardware("a100-100g")
FSDP2, OURS = find_compared("fsdp2"), find_compared("default")
PLAIN, TWO_HOP = flat_trace(), two_hop_trace()


def larger(times: int, trace: Trace) -> Trace:
    """Return the trace with a multiple of its compute."""
    events = tuple(
        replace(event, flops=times * event.flops) if isinstance(event, Compute) else event
        for event in trace.events
    )
    return replace(trace, events=events)


def needing(gib: int, trace: Trace) -> Trace:
    return replace(trace, memory=MemoryEstimate(gib << 30, 0, 0, 0, 0, 0, 0))


def test_on_slow_links_it_recommends_ours_with_the_reason_and_the_limit() -> None:
    ranked = rank({FSDP2: PLAIN, OURS: TWO_HOP}, A100)
    sentences = recommend(ranked, A100)
    assert ranked[0].strategy is OURS
    why, until, script, estimates = sentences
    speedup = simulate(PLAIN, A100).step_seconds / simulate(TWO_HOP, A100).step_seconds
    assert f"{speedup:.2f}x as fast as FSDP2 as it comes" in why
    assert "waiting for the link across nodes" in why
    assert "Each node sends 201 MB per step instead of 805 MB, at 100 Gbit/s" in why
    assert until.startswith("Above ")
    assert until.endswith("Gbit/s FSDP2 as it comes is as fast.")
    assert "zpp = zeropp.apply(model, zeropp.Config())" in script
    assert estimates.startswith("Codec speeds on a100-100g are estimates")


def test_the_link_from_which_on_plain_is_as_fast() -> None:
    rate = slowest_link_as_fast(PLAIN, TWO_HOP, A100)
    assert rate is not None

    def ratio(link_gbit_s: float) -> float:
        machine = A100.changed(link_gbit_s=link_gbit_s)
        return simulate(PLAIN, machine).step_seconds / simulate(TWO_HOP, machine).step_seconds

    assert ratio(rate) <= SAME_SPEED < ratio(rate / 1.01)


def test_a_strategy_with_fewer_bytes_on_all_links_is_faster_at_any_rate() -> None:
    assert slowest_link_as_fast(PLAIN, larger(1, flat_trace(wire_bytes=1 << 20, flops=10**11)), A100) is None
    assert slowest_link_as_fast(PLAIN, PLAIN, A100) == pytest.approx(0.01)


def test_on_fast_links_it_recommends_fsdp2_and_names_the_rate_below_which_zeropp_helps() -> None:
    machine = A100.changed(link_gbit_s=3200.0)
    ranked = rank({FSDP2: PLAIN, OURS: TWO_HOP}, machine)
    sentences = recommend(ranked, machine)
    assert ranked[0].strategy is FSDP2
    does_not, below, script = sentences
    assert script == "In your script: fully_shard without changes."
    assert does_not.startswith("ZeRO++ does not help here: use FSDP2 as it comes")
    assert "With links below" in below
    assert "zeropp's default would be faster" in below


def test_a_larger_batch_can_change_the_answer() -> None:
    traces = {FSDP2: PLAIN, OURS: TWO_HOP}
    machine = A100.changed(link_gbit_s=300.0)
    dry_runs: list[tuple[Strategy, int]] = []

    def larger_batch(strategy: Strategy, times: int) -> Trace:
        dry_runs.append((strategy, times))
        return larger(times, traces[strategy])

    sentences = recommend(rank(traces, machine), machine, larger_batch)
    (sentence,) = (sentence for sentence in sentences if "times the micro-batch" in sentence)
    times = dry_runs[-1][1]
    assert sentence == f"With {times} times the micro-batch FSDP2 as it comes is as fast."
    assert simulate(larger(times, PLAIN), machine).step_seconds <= SAME_SPEED * (
        simulate(larger(times, TWO_HOP), machine).step_seconds
    )


def test_a_larger_batch_that_does_not_fit_is_not_considered() -> None:
    ranked = rank({FSDP2: PLAIN, OURS: TWO_HOP}, A100)
    sentences = recommend(ranked, A100, lambda strategy, times: needing(100, PLAIN))
    assert "2 times the micro-batch does not fit. Below that, the answer is the same." in sentences


def test_a_strategy_that_does_not_fit_is_not_recommended() -> None:
    ranked = rank({FSDP2: PLAIN, OURS: needing(81, TWO_HOP)}, A100)
    assert ranked[0].strategy is FSDP2
    assert not ranked[1].fits


def test_the_advice_mentions_that_plain_fsdp2_does_not_fit() -> None:
    ranked = rank({FSDP2: needing(90, PLAIN), OURS: TWO_HOP}, A100)
    sentences = recommend(ranked, A100)
    assert ranked[0].fits
    assert "(which does not fit: 90.0 GiB)" in sentences[0]
    expected = "FSDP2 as it comes does not fit: it needs 90.0 GiB per rank, and a rank has 80 GiB."
    assert expected in sentences


def test_when_nothing_fits_the_advice_is_a_way_out() -> None:
    ranked = rank({FSDP2: needing(90, PLAIN), OURS: needing(91, TWO_HOP)}, A100)
    sentences = recommend(ranked, A100)
    assert not ranked[0].fits
    assert sentences[0].startswith("Nothing fits: the smallest strategy, FSDP2 as it comes, needs 90.0 GiB")


def test_rank_puts_the_fastest_first() -> None:
    ranked = rank({FSDP2: PLAIN, OURS: TWO_HOP}, A100)
    assert [planned.strategy for planned in ranked] == [OURS, FSDP2]


def test_only_strategies_that_make_sense_are_compared() -> None:
    def names(nodes: int, ranks_per_node: int, micro_batches: int) -> set[str]:
        return {strategy.name for strategy in sensible_strategies(nodes, ranks_per_node, micro_batches)}

    assert names(2, 8, 4) == {strategy.name for strategy in COMPARED}
    assert "fsdp2-accumulate" not in names(2, 8, 1)
    assert not {"hsdp", "fsdp2-reshard"} & names(1, 8, 4)
    assert "fsdp2-reshard" not in names(2, 1, 4)
