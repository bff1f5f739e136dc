"""The planner's entry point: a plan for one scenario, from dry runs that are each made once."""

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
"""Strategies that a sweep compares."""


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
    """What a step of `scenario` would cost on `hardware`.

    Args:
        scenario: the model, the ranks, the batch.
        hardware: what it runs on.
        strategy: how to train, if `advise` does not ask for all of them; plain FSDP2 is shown beside it.
        advise: compare all strategies that make sense, and say in words which to use.
        axes: also sweep over these links and numbers of nodes.
        full: dry-run all layers, where a few and multiplication would do.
        on_progress: told which dry run starts.
    """

    @cache
    def trace_of(scenario: Scenario, strategy: Strategy) -> Trace:
        place = f"{count(scenario.nodes, 'node')} x {count(scenario.ranks_per_node, 'rank')}"
        on_progress(f"dry run: {strategy.title}, {place}")
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
