"""Report of a plan as a self-contained HTML page, with timelines of the best strategies."""

from __future__ import annotations

from ..pages import (
    STRATEGY_COLORS,
    WORK_COLORS,
    Bar,
    BarPart,
    Chart,
    Line,
    Phase,
    Span,
    Step,
    bars,
    figure,
    figures,
    items,
    lines,
    page,
    paragraph,
    table,
    timelines,
)
from ..plan.chrome import TRACKS
from ..plan.recommend import PLAIN, PlannedStrategy
from ..plan.result import Plan
from ..plan.sweep import Point
from ..strategies import DEFAULT
from .plan import EXPLANATION, memory_lines, split_lines, strategy_lines, sweep_lines

SHOWN_STEPS = 2
"""Number of best strategies whose steps are drawn, below that of plain FSDP2."""


def render_plan(plan: Plan) -> str:
    """Return the plan as an HTML page."""
    titles = {planned.strategy.title: planned.strategy.name for planned in plan.strategies}

    def class_of(title: str) -> str:
        return "ours" if titles.get(title) == DEFAULT else "baseline" if titles.get(title) == PLAIN else ""

    sections = [
        paragraph(f"Predicted, not measured: {plan.subject}."),
        figure(timeline_chart(plan)),
        figures(step_chart(plan), bytes_chart(plan)),
        table(strategy_lines(plan.strategies), class_of),
        items(plan.sentences) if plan.sentences else "",
        paragraph(EXPLANATION, "note"),
    ]
    if plan.points:
        sections.append("<h2>Throughput by link rate and nodes</h2>")
        sections.append(figures(*sweep_charts(plan.points)))
        for nodes, text in sweep_lines(plan.points).items():
            sections += [f"<h3>Tokens per second, {nodes} nodes</h3>", table(text)]
    sections += ["<h2>Critical path of a step, ms</h2>", table(split_lines(plan.strategies), class_of)]
    sections += ["<h2>Peak memory of a rank, GiB</h2>", table(memory_lines(plan.strategies), class_of)]
    sections.append(paragraph(f"{plan.hardware.name}: {plan.hardware.source}.", "note"))
    return page("zeropp plan", headline(plan), sections)


def headline(plan: Plan) -> str:
    """Return the result in words: the first strategy against plain FSDP2."""
    best, plain = plan.strategies[0], _plain(plan)
    step = f"{best.step_seconds * 1e3:,.0f} ms a step"
    if plain is None:
        return f"{best.strategy.title}: {step}"
    if plain is best:
        return f"{best.strategy.title} is the fastest here: {step}"
    ratio = plain.step_seconds / best.step_seconds
    sent, sent_plain = best.sent_bytes, plain.sent_bytes
    fewer = f" and {sent_plain / sent:.3g}x fewer bytes across nodes" if sent else ""
    return f"{best.strategy.title}: {step}, {ratio:.2f}x the throughput of plain FSDP2{fewer}"


def _plain(plan: Plan) -> PlannedStrategy | None:
    return next((planned for planned in plan.strategies if planned.strategy.name == PLAIN), None)


def step_chart(plan: Plan) -> Chart:
    rows = []
    for planned in plan.strategies:
        strategy, step_ms = planned.strategy, planned.step_seconds * 1e3
        fits = "" if planned.fits else ", does not fit"
        tip = f"{strategy.title}: {planned.timeline.tokens_per_second:,.0f} tokens/s"
        part = BarPart(step_ms, STRATEGY_COLORS[strategy.name], tip)
        rows.append(Bar(strategy.title, f"{step_ms:,.1f} ms{fits}", (part,), strategy.name == DEFAULT))
    return bars("Time of a step (ms)", rows, "ms", note="Shorter is better.")


def bytes_chart(plan: Plan) -> Chart:
    rows = []
    for planned in plan.strategies:
        strategy, sent = planned.strategy, planned.sent_bytes
        part = BarPart(sent / 1e9, STRATEGY_COLORS[strategy.name], f"{strategy.title}: {sent:,.0f} bytes")
        rows.append(Bar(strategy.title, f"{sent / 1e9:,.3g} GB", (part,), strategy.name == DEFAULT))
    return bars("Sent by a node to others in a step (GB)", rows, "GB")


def timeline_chart(plan: Plan) -> Chart:
    """Chart the steps of plain FSDP2 and of the best strategies on one axis."""
    plain = _plain(plan)
    best = [planned for planned in plan.strategies if planned is not plain][:SHOWN_STEPS]
    shown = [_step(planned) for planned in ([] if plain is None else [plain]) + best]
    return timelines("Timeline of one step (ms)", shown, TRACKS, WORK_COLORS)


def _step(planned: PlannedStrategy) -> Step:
    timeline = planned.timeline
    spans = [
        Span(resource, op.kind, op.start, op.end, op.name)
        for op in timeline.ops
        for resource in op.resources
        if op.kind != "wait" and op.seconds > 0
    ]
    phases = [Phase(*phase) for phase in timeline.phases()]
    return Step(planned.strategy.title, spans, phases, timeline.step_seconds)


def sweep_charts(points: tuple[Point, ...]) -> list[Chart]:
    """Chart throughput by link rate on most nodes, and by nodes on the slowest and the fastest link."""
    nodes, rates = {point.nodes for point in points}, {point.link_gbit_s for point in points}
    charts = []
    if len(rates) > 1:
        most = [point for point in points if point.nodes == max(nodes)]
        charts.append(
            _lines(most, "link_gbit_s", f"Throughput on {max(nodes)} nodes", "Gbit/s of a node's link")
        )
    if len(nodes) > 1:
        for rate in sorted({min(rates), max(rates)}):
            at_rate = [point for point in points if point.link_gbit_s == rate]
            charts.append(_lines(at_rate, "nodes", f"Throughput at {rate:g} Gbit/s", "nodes"))
    return charts


def _lines(points: list[Point], axis: str, title: str, axis_title: str) -> Chart:
    drawn = []
    for name, label in dict.fromkeys((point.strategy, point.title) for point in points):
        mine = [(getattr(point, axis), point.tokens_per_second) for point in points if point.strategy == name]
        drawn.append(Line(label, STRATEGY_COLORS[name], sorted(mine)))
    return lines(f"{title} (tokens/s)", drawn, axis_title, "tokens/s", log=True, from_zero=True)
