"""The planner's entry point. Each dry run of a plan runs once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from ... import _text as wording
from ..._text import count
from ..strategies import DEFAULT, Strategy
from .dry_run import dry_run
from .hardware import Hardware
from .recommend import PLAIN, find_compared, rank, recommend, sensible_strategies
from .result import Plan
from .scenario import Scenario
from .sweep import Axes, Point, sweep
from .trace import Trace

SWEPT = (PLAIN, "hsdp", "paper", DEFAULT)
"""Names of the strategies that a sweep compares."""


def make_plan(
    scenario: Scenario,
    hardware: Hardware,
    strategy: Strategy,
    *,
    advise: bool = False,
    axes: Axes | None = None,
    full: bool = False,
    on_progress: Callable[[str], object] = lambda _: None,
) -> Plan:
    """Predict the cost of a training step.

    Args:
        scenario: the model, the ranks, the batch.
        hardware: the cluster to predict for.
        strategy: how to train. The plan compares it with plain FSDP2, unless `advise` is set.
        advise: compare all sensible strategies instead, and recommend one in words.
        axes: also sweep over these links and numbers of nodes.
        full: run all layers in dry runs, instead of a few that are multiplied.
        on_progress: called with a description of each dry run before it starts.
    """

    @cache
    def trace_of(scenario: Scenario, strategy: Strategy) -> Trace:
        cluster = f"{count(scenario.nodes, 'node')} x {count(scenario.ranks_per_node, 'rank')}"
        on_progress(f"dry run: {strategy.title}, {cluster}")
        return dry_run(scenario, strategy, full=full)

    def larger_batch(strategy: Strategy, times: int) -> Trace:
        return trace_of(replace(scenario, micro_batch=times * scenario.micro_batch), strategy)

    strategies = list(dict.fromkeys([strategy, find_compared(PLAIN)]))
    if advise:
        strategies = sensible_strategies(scenario.nodes, scenario.ranks_per_node, scenario.micro_batches)
    ranked = rank({strategy: trace_of(scenario, strategy) for strategy in strategies}, hardware)
    if not advise:
        ranked.sort(key=lambda planned: planned.strategy != strategy)
    sentences = recommend(ranked, hardware, larger_batch) if advise else ()
    points: list[Point] = []
    if axes is not None:
        points = sweep(
            axes,
            [find_compared(name) for name in SWEPT],
            hardware,
            scenario.nodes,
            lambda strategy, nodes: trace_of(replace(scenario, nodes=nodes), strategy),
        )
    subject = _subject(scenario, ranked[0].timeline.trace.parameters)
    return Plan(subject, hardware, tuple(ranked), sentences, tuple(points))


def _subject(scenario: Scenario, parameters: int) -> str:
    batch = f"{scenario.micro_batches} x {scenario.micro_batch} x {scenario.sequence}"
    return (
        f"{scenario.model.name} ({wording.parameters(parameters)} parameters), "
        f"{count(scenario.nodes, 'node')} x {count(scenario.ranks_per_node, 'rank')}, "
        f"{batch} tokens per rank and step, {scenario.compute}"
    )
