"""Tables of a plan, as text and as rich tables."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from ..._text import size
from ..plan.recommend import GIB, PlannedStrategy
from ..plan.result import Plan
from ..plan.sweep import Point
from ..plan.timeline import KINDS
from ..plan.trace import Phase
from .bench_tables import as_table

COLUMNS = ("", "step ms", "tokens/s", "TFLOPs", "across", "memory GiB", "waits most for")
EXPLANATION = (
    "step: predicted time of an optimizer step. TFLOPs: per rank, including recomputation. across: sent by a "
    "node to others in a step. waits most for: kind of work with the largest exposed time, which is its time "
    "on the critical path after overlap."
)


def plan_tables(plan: Plan) -> list[Table]:
    """Return tables of the strategies, their critical paths, their memory, and the sweep."""
    tables = [
        as_table(f"{plan.subject}, on {plan.hardware.name}", strategy_lines(plan.strategies)),
        as_table("critical path of a step, ms", split_lines(plan.strategies)),
        as_table("peak memory of a rank, GiB", memory_lines(plan.strategies)),
    ]
    if plan.points:
        tables += [
            as_table(f"tokens/s, {nodes} nodes", lines) for nodes, lines in sweep_lines(plan.points).items()
        ]
    return tables


def strategy_lines(strategies: tuple[PlannedStrategy, ...]) -> list[list[str]]:
    return [list(COLUMNS)] + [
        [
            planned.strategy.title,
            f"{planned.step_seconds * 1e3:,.1f}",
            f"{planned.timeline.tokens_per_second:,.0f}",
            f"{planned.timeline.tflops:,.3g}",
            size(planned.sent_bytes),
            f"{planned.peak_gib:,.2f}" + ("" if planned.fits else " (does not fit)"),
            planned.timeline.bottleneck,
        ]
        for planned in strategies
    ]


def split_lines(strategies: tuple[PlannedStrategy, ...]) -> list[list[str]]:
    phases: tuple[Phase, ...] = ("forward", "backward", "optimizer")
    return [["", *KINDS, *phases]] + [
        [
            planned.strategy.title,
            *(f"{planned.timeline.critical_seconds[kind] * 1e3:,.1f}" for kind in KINDS),
            *(f"{planned.timeline.phase_seconds()[phase] * 1e3:,.1f}" for phase in phases),
        ]
        for planned in strategies
    ]


def memory_lines(strategies: tuple[PlannedStrategy, ...]) -> list[list[str]]:
    parts = [asdict(planned.memory) for planned in strategies]
    return [["", *(name.replace("_", " ") for name in parts[0]), "peak"]] + [
        [
            planned.strategy.title,
            *(f"{value / GIB:,.2f}" for value in part.values()),
            f"{planned.peak_gib:,.2f}",
        ]
        for planned, part in zip(strategies, parts, strict=True)
    ]


def sweep_lines(points: tuple[Point, ...]) -> dict[int, list[list[str]]]:
    """Return the lines of a table for each number of nodes: strategies against link rates."""
    rates = sorted({point.link_gbit_s for point in points})
    titles = list(dict.fromkeys(point.title for point in points))
    found = {(point.title, point.nodes, point.link_gbit_s): point for point in points}
    return {
        nodes: [["", *(f"{rate:g} Gbit/s" for rate in rates)]]
        + [
            [title, *(f"{found[title, nodes, rate].tokens_per_second:,.0f}" for rate in rates)]
            for title in titles
        ]
        for nodes in sorted({point.nodes for point in points})
    }
