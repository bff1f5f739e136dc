from __future__ import annotations

import re
from dataclasses import replace

from tests.tools.report.test_plan import sample_plan
from zeropp.tools.report.plan_page import headline, render_plan, timeline_chart


def test_the_report_is_self_contained() -> None:
    html = render_plan(sample_plan())
    assert not re.findall(r"\bsrc=|\bhref=", html)
    assert "Use zeropp&#x27;s default" in html
    assert html.count("<figure>") == 6  # timelines, times, bytes, links, nodes at two rates
    assert "NVIDIA A100 80GB SXM data sheet" in html
    assert "Predicted, not measured" in html
    assert len(html) < 100_000


def test_the_result_in_words() -> None:
    plan = sample_plan()
    best, plain = plan.strategies
    assert headline(plan) == (
        f"zeropp's default: {best.step_seconds * 1e3:,.0f} ms a step, "
        f"{plain.step_seconds / best.step_seconds:.2f}x the throughput of plain FSDP2 "
        "and 4x fewer bytes across nodes"
    )
    assert "is the fastest here" in headline(replace(plan, strategies=(plain, best)))
    assert "FSDP2" not in headline(replace(plan, strategies=(best,)))


def test_timelines_are_on_one_axis_with_plain_fsdp2_first() -> None:
    plan = sample_plan()
    best, plain = plan.strategies
    chart = timeline_chart(plan)
    titles = re.findall(r'class="strong" x="0" y="[\d.]+">(.*?):', chart.body)
    assert titles == [plain.strategy.title, "zeropp&#x27;s default"]
    for planned in (best, plain):
        phases = planned.timeline.phases()
        assert [phase for phase, _, _ in phases] == ["forward", "backward", "optimizer"]
        assert phases[-1][2] == planned.step_seconds
    bands = re.findall(r'class="phase optimizer" x="([\d.]+)%" y="[\d.]+" width="([\d.]+)%"', chart.body)
    ends = [float(x) + float(width) for x, width in bands]
    assert abs(ends[0] - 100) < 0.01
    assert abs(ends[1] - 100 * best.step_seconds / plain.step_seconds) < 0.01
