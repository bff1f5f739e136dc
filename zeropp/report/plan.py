"""A plan as rich tables, and as one HTML file with the picture of its step."""

from __future__ import annotations

from dataclasses import asdict
from html import escape
from typing import Any

from rich.table import Table

from ..plan.chrome import LANES
from ..plan.recommend import GIB, PlannedStrategy
from ..plan.result import Plan
from ..plan.sweep import Point
from ..plan.timeline import KINDS, Kind, Timeline
from ..plan.trace import Phase
from ..wording import size
from .bench_tables import as_table
from .page import HEIGHT, Figures, graph_objects, page, table

COLUMNS = ("", "step ms", "tokens/s", "TFLOPs", "across", "memory GiB", "waits most for")
EXPLANATION = (
    "step: predicted time of an optimizer step. TFLOPs: per rank, recomputation included. across: sent by a "
    "node to others in a step. The split of a step is its longest path: what it waits for, after overlap."
)
COLORS: dict[Kind, str] = {
    "compute": "#4c78a8",
    "codec": "#b279a2",
    "in-node link": "#8ecfa8",
    "across link": "#c1121f",
}
MAX_BARS = 3000
"""Bars that a picture has at most; a longer step is cut off."""


def plan_tables(plan: Plan) -> list[Table]:
    """The strategies, the split of each one's step, memory, and the sweep."""
    tables = [
        as_table(f"{plan.subject}, on {plan.hardware.name}", strategy_lines(plan.strategies)),
        as_table("what a step waits for, ms", split_lines(plan.strategies)),
        as_table("memory of a rank at its peak, GiB", memory_lines(plan.strategies)),
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
    parts = [asdict(planned.timeline.trace.memory) for planned in strategies]
    return [["", *(name.replace("_", " ") for name in parts[0]), "peak"]] + [
        [
            planned.strategy.title,
            *(f"{value / GIB:,.2f}" for value in part.values()),
            f"{planned.peak_gib:,.2f}",
        ]
        for planned, part in zip(strategies, parts, strict=True)
    ]


def sweep_lines(points: tuple[Point, ...]) -> dict[int, list[list[str]]]:
    """By number of nodes: strategies against link rates."""
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


def render_plan(plan: Plan) -> str:
    """The plan as an HTML page."""
    figures = Figures()
    advice = "".join(f"<li>{escape(sentence)}</li>" for sentence in plan.sentences)
    sections = [
        f"<p>{escape(plan.subject)}.<br>{escape(plan.hardware.name)}: {escape(plan.hardware.source)}.</p>",
        f"<ul>{advice}</ul>" if advice else "",
        table(strategy_lines(plan.strategies)),
        f'<p class="note">{escape(EXPLANATION)}</p>',
        "<h2>What a step waits for</h2>",
        table(split_lines(plan.strategies)),
        "<h2>Memory</h2>",
        table(memory_lines(plan.strategies)),
    ]
    if plan.points:
        sections.append("<h2>Throughput against link rate and nodes</h2>")
        for nodes, lines in sweep_lines(plan.points).items():
            sections += [f"<h3>{nodes} nodes</h3>", table(lines)]
        sections += [figures.add(figure) for figure in sweep_figures(plan.points)]
    for planned in plan.strategies[:3]:
        sections += [f"<h2>A step of {escape(planned.strategy.title)}</h2>"]
        sections += [figures.add(timeline_figure(planned.timeline))]
    return page("zeropp plan", plan.subject, sections)


def timeline_figure(timeline: Timeline) -> Any:
    """One lane per resource, one bar per operation."""
    go = graph_objects()
    shown = [op for op in timeline.ops if op.kind != "wait" and op.seconds > 0][:MAX_BARS]
    figure = go.Figure()
    for kind in KINDS:
        bars = [(op, resource) for op in shown if op.kind == kind for resource in op.resources]
        if bars:
            figure.add_bar(
                y=[resource for _, resource in bars],
                x=[op.seconds * 1e3 for op, _ in bars],
                base=[op.start * 1e3 for op, _ in bars],
                text=[op.name for op, _ in bars],
                textposition="none",
                customdata=[op.seconds * 1e3 for op, _ in bars],
                # %{x} would be where the bar ends
                hovertemplate="%{text}<br>%{customdata:.4f} ms from %{base:.4f}<extra></extra>",
                orientation="h",
                marker_color=COLORS[kind],
                name=kind,
            )
    used = {resource for op in shown for resource in op.resources}
    figure.update_yaxes(categoryorder="array", categoryarray=[lane for lane in LANES[::-1] if lane in used])
    figure.update_layout(barmode="overlay", height=HEIGHT, xaxis_title="ms")
    return figure


def sweep_figures(points: tuple[Point, ...]) -> list[Any]:
    """Throughput against links on most nodes, and against nodes on the slowest and the fastest link."""
    nodes, rates = {point.nodes for point in points}, {point.link_gbit_s for point in points}
    figures = []
    if len(rates) > 1:
        most = [point for point in points if point.nodes == max(nodes)]
        figures.append(
            _lines(most, "link_gbit_s", f"tokens/s on {max(nodes)} nodes", "Gbit/s of a node's link")
        )
    if len(nodes) > 1:
        for rate in sorted({min(rates), max(rates)}):
            at_rate = [point for point in points if point.link_gbit_s == rate]
            figures.append(_lines(at_rate, "nodes", f"tokens/s at {rate:g} Gbit/s", "nodes"))
    return figures


def _lines(points: list[Point], axis: str, title: str, axis_title: str) -> Any:
    figure = graph_objects().Figure()
    for name in dict.fromkeys(point.title for point in points):
        mine = [point for point in points if point.title == name]
        figure.add_scatter(
            x=[getattr(point, axis) for point in mine],
            y=[point.tokens_per_second for point in mine],
            mode="lines+markers",
            name=name,
        )
    figure.update_layout(title=title, height=HEIGHT, xaxis_title=axis_title)
    figure.update_xaxes(type="log")
    figure.update_yaxes(rangemode="tozero")
    return figure
