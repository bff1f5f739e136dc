from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp.tools.pages import Bar, BarPart, Line, Phase, Span, Step, bars, lines, timelines
from zeropp.tools.pages.charts import MAX_POINTS, ROW_LETTERS, merged, nice_ticks, shorten_label

POSITIVE = st.floats(1e-6, 1e12)


def percents(name: str, body: str) -> list[float]:
    return [float(value) for value in re.findall(rf'{name}="([\d.]+)%"', body)]


@given(st.lists(POSITIVE, min_size=1, max_size=9))
def test_bars_are_as_long_as_their_values(values: list[float]) -> None:
    rows = [Bar(str(number), "", (BarPart(value, "red", ""),)) for number, value in enumerate(values)]
    widths = percents("width", bars("", rows, "ms").body)
    assert len(widths) == len(values)
    assert widths == pytest.approx([99 * value / max(values) for value in values], abs=1e-3)


def test_parts_follow_each_other_and_marks_are_on_the_same_scale() -> None:
    rows = [Bar("a", "", (BarPart(1.0, "red", ""), BarPart(2.0, "blue", "")), mark=4.0)]
    body = bars("", rows, "ms").body
    assert percents("width", body) == [24.75, 49.5]
    assert re.findall(r'<rect class="bar" x="([\d.]+)%"', body) == ["0", "24.75"]
    assert 'class="mark" x1="99%"' in body


def test_a_value_of_zero_has_no_bar() -> None:
    assert percents("width", bars("", [Bar("a", "0", (BarPart(0.0, "red", ""),))], "ms").body) == [0.0]


@given(POSITIVE, st.floats(0, 0.999))
def test_ticks_are_few_and_within(high: float, share: float) -> None:
    low = share * high
    ticks = nice_ticks(high, low)
    assert 1 <= len(ticks) <= 7
    assert all(low - 1e-6 * high <= tick <= high * (1 + 1e-6) for tick in ticks)
    assert all(one < other for one, other in pairwise(ticks))


def test_lines_go_from_the_first_point_to_the_last() -> None:
    body = lines("", [Line("a", "red", [(1.0, 5.0), (10.0, 3.0), (100.0, 1.0)])], "Gbit/s", "", log=True).body
    assert re.findall(r'cx="([\d.]+)%"', body) == ["1", "50", "99"]
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', body)]
    assert heights == sorted(heights)
    assert "a: 3 at 10" in body


def test_a_long_line_shows_means_with_a_note() -> None:
    points = [(float(step), float(step % 2)) for step in range(1, 1001)]
    chart = lines("", [Line("a", "red", points)], "step", "loss")
    assert chart.body.count("<circle") <= MAX_POINTS
    assert "mean" in chart.note
    assert "a: 0.5" in chart.body
    assert lines("", [Line("a", "red", points[:9])], "step", "loss").note == ""


def test_values_that_are_not_finite_are_omitted() -> None:
    body = lines("", [Line("a", "red", [(1.0, 5.0), (2.0, math.nan), (3.0, 4.0)])], "step", "loss").body
    assert body.count("<circle") == 2
    assert "nan" not in body


def test_steps_are_on_one_scale_with_their_phases() -> None:
    def step(title: str, seconds: float) -> Step:
        spans = [Span("compute", "compute", 0.0, seconds, "forward blocks.0")]
        return Step(title, spans, [Phase("forward", 0.0, seconds)], seconds)

    chart = timelines("", [step("slow", 0.4), step("fast", 0.1)], ["compute", "gather"], {"compute": "red"})
    spans = re.findall(r'class="span" x="0%" y="[\d.]+" width="([\d.]+)%"', chart.body)
    assert spans == ["100", "25"]
    assert "forward blocks.0: 400 ms from 0 ms" in chart.body  # its length and its start, not its end
    assert chart.body.count(">forward</text>") == 2
    assert chart.labels.count("compute") == 2
    assert "gather" not in chart.labels


SHORT = st.tuples(st.floats(0, 0.01), st.floats(0, 0.01), st.sampled_from(["codec", "compute"]))


@given(st.lists(SHORT, max_size=60))
def test_merged_bars_cover_all_spans(pieces: list[tuple[float, float, str]]) -> None:
    at, spans = 0.0, []
    for gap, length, kind in pieces:
        spans.append(Span("a", kind, at + gap, at + gap + length, "op"))
        at += gap + length
    found = merged(spans, narrowest=0.004)
    assert sum("op" in span.name for span in found) == len(found) <= len(spans)
    for span in spans:
        assert any(bar.kind == span.kind and bar.start <= span.start and span.end <= bar.end for bar in found)
    busy, shown = (sum(span.end - span.start for span in some) for some in (spans, found))
    assert busy - 1e-9 <= shown <= busy + 0.001 * len(spans)


@given(st.text("abc", max_size=90), st.text("123", max_size=20))
def test_labels_and_values_fit_in_a_row(label: str, text: str) -> None:
    shown = shorten_label(Bar(label, text, ()))
    assert len(shown) + len(text) <= ROW_LETTERS
    assert shown == label or ("…" in shown and label.startswith(shown.split("…")[0]))
