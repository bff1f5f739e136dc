from __future__ import annotations

import pytest

from tests.tools.plan.samples import flat_trace
from zeropp.tools.plan.catalog import find_hardware
from zeropp.tools.plan.sweep import Axes, sweep
from zeropp.tools.plan.timeline import simulate
from zeropp.tools.plan.trace import Trace
from zeropp.tools.strategies import Strategy, find_strategy

A100 = find_hardware("a100-100g")


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("link=10..800", Axes(link_gbit_s=(10, 20, 40, 80, 160, 320, 640, 800))),
        ("nodes=2..48", Axes(nodes=(2, 4, 8, 16, 32, 48))),
        ("link=100/400,nodes=3", Axes(link_gbit_s=(100, 400), nodes=(3,))),
        ("nodes=8..8", Axes(nodes=(8,))),
    ],
)
def test_axes_are_parsed(text: str, axes: Axes) -> None:
    assert Axes.parse(text) == axes


@pytest.mark.parametrize(
    "text",
    ["", "link", "speed=3", "link=fast", "link=0..3", "link=1..2..3", "nodes=9..2", "nodes=2,nodes=3"],
)
def test_invalid_axes_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"sweep is '.*', with '.*' in it; expected ranges such as"):
        Axes.parse(text)


def test_every_combination_is_simulated_with_one_dry_run_per_strategy_and_number_of_nodes() -> None:
    dry_runs: list[tuple[str, int]] = []
    trace = flat_trace()

    def trace_of(strategy: Strategy, nodes: int) -> Trace:
        dry_runs.append((strategy.name, nodes))
        return trace

    strategies = [find_strategy("fsdp2"), find_strategy("default")]
    points = sweep(Axes.parse("link=100/400,nodes=2/4"), strategies, A100, 2, trace_of)
    assert dry_runs == [("fsdp2", 2), ("default", 2), ("fsdp2", 4), ("default", 4)]
    assert len(points) == 8
    fast = next(
        point for point in points if (point.strategy, point.nodes, point.link_gbit_s) == ("default", 4, 400.0)
    )
    timeline = simulate(trace, A100.changed(link_gbit_s=400.0))
    assert fast.step_seconds == pytest.approx(timeline.step_seconds)
    assert fast.tokens_per_second == pytest.approx(timeline.tokens_per_second)


def test_an_axis_that_is_not_given_has_the_value_of_the_hardware() -> None:
    points = sweep(
        Axes.parse("nodes=3"), [find_strategy("fsdp2")], A100, 2, lambda strategy, nodes: flat_trace()
    )
    assert [(point.nodes, point.link_gbit_s) for point in points] == [(3, 100.0)]
