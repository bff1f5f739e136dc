"""SVG charts: bars, lines and timelines, of a few kilobytes each.

[Note: Any width]
Positions along x are percentages and positions along y are pixels. So a chart fills any width, and its text
keeps its size, also on a phone. A path cannot have percentages: it is in a nested `<svg>`, which is
stretched. The labels to the left of a chart (of its rows or its vertical axis) are a separate `<svg>`, which
zooming does not move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

BAR_ROW, BAR_HEIGHT = 38, 13
LINE_HEIGHT = 240
LANE_ROW, LANE_HEIGHT, HEAD_ROW = 22, 16, 44
AXIS_ROW = 40
"""Pixels below a chart, for the numbers and the title of its axis."""
ROW_LETTERS = 54
"""Letters that fit in a row on a screen of 390 pixels."""
MAX_POINTS = 120
"""Largest number of points of a line. A longer line shows means."""
NARROWEST = 1 / 1500
"""Smallest visible share of a timeline. Shorter operations of one kind that follow each other are one bar."""


@dataclass(frozen=True)
class Chart:
    title: str
    """Title, with the unit."""
    body: str
    height: float
    labels: str = ""
    """SVG of the labels to the left of the chart."""
    gutter: int = 0
    """Width of the labels in pixels."""
    legend: Mapping[str, str] = field(default_factory=dict)
    """Colors by their meaning."""
    zooms: bool = False
    note: str = ""


class BarPart(NamedTuple):
    """A part of a bar."""

    value: float
    color: str
    tip: str


class Bar(NamedTuple):
    label: str
    text: str
    """Value with its unit."""
    parts: tuple[BarPart, ...]
    stands_out: bool = False
    spread: float = 0.0
    """Half of the interquartile range."""
    mark: float | None = None
    """Second value, drawn as a line across the bar."""


def bars(
    title: str, rows: Sequence[Bar], unit: str, legend: Mapping[str, str] | None = None, note: str = ""
) -> Chart:
    """Chart one bar per row, below its label and value."""
    longest = max(
        (max(sum(part.value for part in row.parts) + row.spread, row.mark or 0.0) for row in rows),
        default=0.0,
    )
    ticks = nice_ticks(longest)
    scale = _scale(longest)
    bottom = len(rows) * BAR_ROW + 6
    body = [_grid(ticks, scale, bottom, unit)]
    for number, row in enumerate(rows):
        top = number * BAR_ROW
        style = ' class="strong"' if row.stands_out else ""
        body.append(f'<text x="0" y="{top + 14}"{style}>{escape(shorten_label(row))}</text>')
        body.append(f'<text x="100%" y="{top + 14}" text-anchor="end"{style}>{escape(row.text)}</text>')
        body.append(_bar(row, top + 20, scale))
    return Chart(title, "".join(body), bottom + AXIS_ROW, legend=legend or {}, note=note)


def shorten_label(row: Bar) -> str:
    """Return the label, without its middle if it does not fit next to the value.

    >>> shorten_label(Bar("runs/of/november/the/one/with/quite/a/long/name/plain", "14.44", ()))
    'runs/of/november/the/one…/quite/a/long/name/plain'
    """
    room = ROW_LETTERS - len(row.text)
    half = (room - 1) // 2
    return row.label if len(row.label) <= room else f"{row.label[: room - 1 - half]}…{row.label[-half:]}"


def _bar(row: Bar, y: float, scale: float) -> str:
    drawn, start = [], 0.0
    for part in row.parts:
        drawn.append(
            f'<rect class="bar" x="{_percent(start * scale)}" y="{y}" width="{_percent(part.value * scale)}" '
            f'height="{BAR_HEIGHT}" fill="{part.color}" data-tip="{escape(part.tip)}"/>'
        )
        start += part.value
    middle = y + BAR_HEIGHT / 2
    if row.spread:
        low, high = (_percent((start + sign * row.spread) * scale) for sign in (-1, 1))
        drawn.append(f'<line class="ink" x1="{low}" x2="{high}" y1="{middle}" y2="{middle}"/>')
    if row.mark is not None:
        at = _percent(row.mark * scale)
        drawn.append(f'<line class="mark" x1="{at}" x2="{at}" y1="{y - 3}" y2="{y + BAR_HEIGHT + 3}"/>')
    return "".join(drawn)


class Line(NamedTuple):
    label: str
    color: str
    points: Sequence[tuple[float, float]]
    dotted: bool = False


def lines(
    title: str,
    drawn: Sequence[Line],
    x_title: str,
    y_unit: str,
    *,
    log: bool = False,
    from_zero: bool = False,
) -> Chart:
    """Chart lines over a linear or logarithmic horizontal axis."""
    thinned = [line._replace(points=_means(line.points)) for line in drawn]
    xs = [x for line in thinned for x, _ in line.points]
    ys = [y for line in thinned for _, y in line.points if math.isfinite(y)]
    low, high = (0.0 if from_zero else min(ys, default=0.0)), max(ys, default=1.0)
    ticks = nice_ticks(high, low)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    first, last = min(xs), max(xs)

    def across(x: float) -> float:
        if last == first:
            return 50.0
        if log:
            return 98 * math.log(x / first) / math.log(last / first) + 1
        return 98 * (x - first) / (last - first) + 1

    def down(y: float) -> float:
        return LINE_HEIGHT - 8 - (LINE_HEIGHT - 24) * (y - low) / ((high - low) or 1.0)

    body, labels = [], []
    for tick in ticks:
        y = down(tick)
        body.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        labels.append(f'<text x="52" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    shown = sorted(set(xs)) if log else [tick for tick in nice_ticks(last, first) if first <= tick <= last]
    body += [_tick(across(x), LINE_HEIGHT + 12, short(x)) for x in _few(shown or [first])]
    body.append(_axis_title(x_title, LINE_HEIGHT + 30))
    labels.append(
        f'<text class="soft" x="52" y="{LINE_HEIGHT + 30}" text-anchor="end">{escape(y_unit)}</text>'
    )
    for line in thinned:
        body.append(_line(line, [(across(x), down(y), x, y) for x, y in line.points if math.isfinite(y)]))
    each = max(
        (len(line.points) // len(thin.points) for line, thin in zip(drawn, thinned, strict=True)), default=1
    )
    note = "" if each == 1 else "Each point is the mean of the steps since the previous point."
    legend = {line.label: line.color for line in drawn}
    return Chart(title, "".join(body), LINE_HEIGHT + AXIS_ROW, "".join(labels), 58, legend, note=note)


def _line(line: Line, points: list[tuple[float, float, float, float]]) -> str:
    """Draw a line: see [Note: Any width]. Points are visible if they are few, or under the mouse."""
    path = " L".join(f"{x:.2f} {y:.1f}" for x, y, _, _ in points)
    dash = ' stroke-dasharray="4 4"' if line.dotted else ""
    few = " few" if len(points) <= MAX_POINTS // 5 else ""
    circles = "".join(
        f'<circle class="point{few}" cx="{_percent(x)}" cy="{y:.1f}" r="4" fill="{line.color}" '
        f'data-tip="{escape(f"{line.label}: {number(value)} at {number(at)}")}"/>'
        for x, y, at, value in points
    )
    stretched = f'viewBox="0 0 100 {LINE_HEIGHT}" preserveAspectRatio="none"'
    return (
        f'<svg width="100%" height="{LINE_HEIGHT}" {stretched}><path class="line" d="M{path}" '
        f'stroke="{line.color}"{dash} vector-effect="non-scaling-stroke"/></svg>{circles}'
    )


class Span(NamedTuple):
    """An operation on one lane, in seconds."""

    lane: str
    kind: str
    start: float
    end: float
    name: str


class Phase(NamedTuple):
    name: str
    start: float
    end: float


class Step(NamedTuple):
    """The timeline of a step."""

    title: str
    spans: Sequence[Span]
    phases: Sequence[Phase]
    seconds: float


def timelines(title: str, steps: Sequence[Step], lanes: Sequence[str], colors: Mapping[str, str]) -> Chart:
    """Chart steps below each other on one axis, in milliseconds, with a row for each used lane."""
    longest = max(step.seconds for step in steps)
    scale = _scale(longest, room=1.0)
    body, labels, top = [], [], 0.0
    for step in steps:
        used = [lane for lane in lanes if any(span.lane == lane for span in step.spans)]
        body.append(
            f'<text class="strong" x="0" y="{top + 15}">{escape(step.title)}: '
            f"{milliseconds(step.seconds)}</text>"
        )
        bottom = top + HEAD_ROW + len(used) * LANE_ROW
        body += [_phase(phase, top + 22, bottom, scale) for phase in step.phases]
        for row, lane in enumerate(used):
            y = top + HEAD_ROW + row * LANE_ROW
            labels.append(f'<text x="80" y="{y + 12}" text-anchor="end">{escape(lane)}</text>')
            spans = merged([span for span in step.spans if span.lane == lane], NARROWEST * longest)
            body += [_span(span, y, scale, colors) for span in spans]
        top = bottom + 12
    body.insert(0, _grid([1e3 * tick for tick in nice_ticks(longest)], scale / 1e3, top, "ms"))
    return Chart(title, "".join(body), top + AXIS_ROW, "".join(labels), 86, colors, zooms=True)


def _span(span: Span, y: float, scale: float, colors: Mapping[str, str]) -> str:
    tip = f"{span.name}: {milliseconds(span.end - span.start)} from {milliseconds(span.start)}"
    return (
        f'<rect class="span" x="{_percent(span.start * scale)}" y="{y}" '
        f'width="{_percent((span.end - span.start) * scale)}" height="{LANE_HEIGHT}" '
        f'fill="{colors[span.kind]}" data-tip="{escape(tip)}"/>'
    )


def _phase(phase: Phase, top: float, bottom: float, scale: float) -> str:
    """Draw a band behind the lanes, with the name of the phase, or its initial if the band is narrow."""
    share = (phase.end - phase.start) * scale
    name = phase.name if share >= 22 else phase.name[0].upper() if share >= 4 else ""
    at = _percent((phase.start + phase.end) / 2 * scale)
    tip = f"{phase.name}: {milliseconds(phase.end - phase.start)} from {milliseconds(phase.start)}"
    return (
        f'<rect class="phase {phase.name}" x="{_percent(phase.start * scale)}" y="{top}" '
        f'width="{_percent(share)}" height="{bottom - top}" data-tip="{escape(tip)}"/>'
        f'<text class="soft" x="{at}" y="{top + 14}" text-anchor="middle">{name}</text>'
    )


def merged(spans: Sequence[Span], narrowest: float) -> list[Span]:
    """Merge short consecutive spans of one kind, so that the timeline has fewer bars."""
    found: list[Span] = []
    counts: list[int] = []
    for span in sorted(spans, key=lambda span: span.start):
        before = found[-1] if found else None
        if (
            before is not None
            and before.kind == span.kind
            and span.start - before.end < narrowest / 4
            and min(span.end - span.start, before.end - before.start) < narrowest
        ):
            counts[-1] += 1
            found[-1] = before._replace(end=max(before.end, span.end))
        else:
            found.append(span)
            counts.append(1)
    return [
        span if count == 1 else span._replace(name=f"{count} operations from {span.name} on")
        for span, count in zip(found, counts, strict=True)
    ]


def nice_ticks(high: float, low: float = 0.0) -> list[float]:
    """Return at most six round numbers from `low` to `high`.

    >>> nice_ticks(3330.0)
    [0.0, 1000.0, 2000.0, 3000.0]
    >>> nice_ticks(5.5, 1.9)
    [2.0, 3.0, 4.0, 5.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= rough * 0.99)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)] or [low]


def number(value: float) -> str:
    """Format a number with four significant digits, or as an integer from 1000.

    >>> number(2500.0), number(1.92751), number(0.0), number(12e9)
    ('2,500', '1.928', '0', '12,000,000,000')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 or value == 0 else f"{value:,.4g}"


def short(value: float) -> str:
    """Format a number for an axis.

    >>> short(2500.0), short(1e6), short(3.2e10), short(0.5)
    ('2,500', '1M', '32G', '0.5')
    """
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= unit:
            size = 1e3 if letter == "k" else unit
            return f"{value / size:.4g}{letter}"
    return number(value)


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds.

    >>> milliseconds(0.0002106), milliseconds(1.275)
    ('0.2106 ms', '1,275 ms')
    """
    return f"{number(1e3 * seconds)} ms"


def _scale(longest: float, room: float = 0.99) -> float:
    """Return the percentage of the width per unit."""
    return 100 * room / longest if longest > 0 else 0.0


def _percent(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") + "%"


def _grid(ticks: Sequence[float], scale: float, bottom: float, unit: str) -> str:
    places = [_percent(tick * scale) for tick in ticks]
    drawn = [f'<line class="grid" x1="{at}" x2="{at}" y1="0" y2="{bottom}"/>' for at in places]
    drawn += [_tick(tick * scale, bottom + 14, short(tick)) for tick in _few(ticks)]
    return "".join(drawn) + _axis_title(unit, bottom + 31)


def _few(ticks: Sequence[float]) -> Sequence[float]:
    """Return as many of the ticks as fit on a narrow screen."""
    return ticks[:: max(1, math.ceil(len(ticks) / 5))]


def _tick(percent: float, y: float, text: str) -> str:
    anchor = "start" if percent < 4 else "end" if percent > 96 else "middle"
    return f'<text class="soft" x="{_percent(percent)}" y="{y}" text-anchor="{anchor}">{text}</text>'


def _axis_title(text: str, y: float) -> str:
    return f'<text class="soft" x="100%" y="{y}" text-anchor="end">{escape(text)}</text>'


def _means(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return at most `MAX_POINTS` points: means of equally many points, at the last of them."""
    each = math.ceil(len(points) / MAX_POINTS)
    if each <= 1:
        return points
    groups = [points[start : start + each] for start in range(0, len(points), each)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
