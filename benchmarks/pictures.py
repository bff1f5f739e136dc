"""Draw docs/pictures from the measured numbers in docs/data.

    python benchmarks/pictures.py

- two-hops.svg: bytes on each link in a step, for FSDP2 with a 16-bit wire and for zeropp (steps.json) -
step.svg: a step of both on one time axis (steps.json) - bench.svg: bytes and throughput of some strategies
(bench-paper.json, from `zeropp lab bench --regime paper`)

benchmarks/step_timelines.py measures steps.json. Each picture is one SVG file with a light and a dark color
scheme.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from zeropp.comm.ledger import Ledger
from zeropp.tools.bench.results import Results
from zeropp.tools.pages import WORK_COLORS, Chart, Phase, Span, Step, timelines
from zeropp.tools.pages.cluster import draw_cluster
from zeropp.tools.pages.page import CHART_STYLE, COLORS
from zeropp.tools.pages.traffic import carried
from zeropp.tools.report.bench_page import bytes_chart, headline, step_chart

DOCS = Path(__file__).parents[1] / "docs"
NODES = [[0, 1], [2, 3]]
TITLES = ("FSDP2, 16-bit wire: one ring", "zeropp: two hops")
WIDTH, MARGIN, GAP = 860, 20, 36
LETTER = 7.2
"""Approximate width of a letter in pixels."""
COMPARED = ("wire16", "wire16-overlap", "hsdp", "hfsdp", "paper", "default-serial", "default", "four-bit")
MACHINE = "2 cores of an AMD EPYC, torch 2.13, gloo"


def main() -> None:
    (DOCS / "pictures").mkdir(exist_ok=True)
    for name, text in draw_all().items():
        (DOCS / "pictures" / name).write_text(text)


def draw_all() -> dict[str, str]:
    steps = json.loads((DOCS / "data" / "steps.json").read_text())
    results = Results.load(DOCS / "data" / "bench-paper.json")
    return {"two-hops.svg": two_hops(steps), "step.svg": one_step(steps), "bench.svg": bench(results)}


def two_hops(steps: list[dict[str, Any]]) -> str:
    ledgers = [_ledger(step) for step in steps]
    links = [[carried(ledger, across=across) for across in (False, True)] for ledger in ledgers]
    most = max(link.sent_bytes for pair in links for link in pair)
    charts = [
        draw_cluster(title, NODES, in_node, across, most)
        for title, (in_node, across) in zip(TITLES, links, strict=True)
    ]
    sent = [ledger.total().across_bytes for ledger in ledgers]
    title = f"{sent[0] / sent[1]:.1f}x fewer bytes across nodes"
    note = f"One step of a {steps[0]['parameters'] / 1e6:.1f}M-parameter GPT; from the ledger of rank 0"
    return picture(title, note, [charts])


def _ledger(step: dict[str, Any]) -> Ledger:
    ledger = Ledger()
    for unit, collective, hop, _, wire_bytes, across_bytes in step["sent"]:
        ledger.record(unit, collective, hop, wire_bytes=wire_bytes, across_bytes=across_bytes)
    return ledger


def one_step(steps: list[dict[str, Any]]) -> str:
    drawn = [
        Step(
            step["title"],
            [Span(kind, kind, start, end, name) for kind, start, end, name in step["spans"]],
            [Phase(*phase) for phase in step["phases"]],
            step["seconds"],
        )
        for step in steps
    ]
    chart = timelines("What runs when (ms)", drawn, list(WORK_COLORS), WORK_COLORS)
    title = f"One step: {drawn[0].seconds / drawn[1].seconds:.1f}x as fast"
    note = f"2 nodes x 2 ranks, links of 226 Mbit/s; a profile of rank 0; {MACHINE}"
    return picture(title, note, [[chart]])


def bench(results: Results) -> str:
    results = replace(results, cells=[cell for cell in results.cells if cell.strategy in COMPARED])
    rows = []
    for count in results.micro_batches():
        where = f"{count} micro-batch{'es' if count > 1 else ''} per step"
        steps = replace(step_chart(results, count), title=f"Time of a step, {where}")
        rows.append([steps, replace(bytes_chart(results, count), title=f"Bytes across nodes, {where}")])
    said, *but = headline(results).split("; ")
    title, _, and_less = said.partition(", ")
    note = f"{results.describe().split(' (')[0]}; red: what no step can beat; {MACHINE}"
    return picture(title, "\n".join([and_less, *but, note]), rows)


def picture(title: str, note: str, rows: Sequence[Sequence[Chart]]) -> str:
    """Return an SVG file with a title, a note and rows of charts."""
    lines = note.splitlines()
    drawn, top = [], 44.0 + 18 * len(lines)
    for row in rows:
        width = (WIDTH - 2 * MARGIN - GAP * (len(row) - 1)) / len(row)
        drawn += [
            _chart(chart, MARGIN + number * (width + GAP), top, width) for number, chart in enumerate(row)
        ]
        top += max(_head(chart) + chart.height for chart in row) + 18
    head = f'<text x="{MARGIN}" y="28" style="font-size: 15px; font-weight: 700">{escape(title)}</text>'
    for number, line in enumerate(lines):
        head += f'<text class="soft" x="{MARGIN}" y="{48 + 18 * number}">{escape(line)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top:.0f}" '
        f'viewBox="0 0 {WIDTH} {top:.0f}" role="img" aria-label="{escape(title)}">'
        f'<style>{COLORS}{CHART_STYLE}</style><rect width="100%" height="100%" fill="var(--paper)"/>{head}'
        f"{''.join(drawn)}</svg>\n"
    )


def _head(chart: Chart) -> int:
    """Return the height of a chart's title and legend in pixels."""
    return 46 if chart.legend else 26


def _chart(chart: Chart, left: float, top: float, width: float) -> str:
    drawn = [f'<text class="strong" x="{left}" y="{top + 14}">{escape(chart.title)}</text>']
    at = left
    for text, color in chart.legend.items():
        drawn.append(f'<rect x="{at}" y="{top + 24}" width="10" height="10" rx="2" fill="{color}"/>')
        drawn.append(f'<text class="soft" x="{at + 15}" y="{top + 33}">{escape(text)}</text>')
        at += 30 + LETTER * len(text)
    below = top + _head(chart)
    drawn.append(
        f'<svg x="{left}" y="{below}" width="{chart.gutter}" height="{chart.height}">{chart.labels}</svg>'
    )
    inside = f'x="{left + chart.gutter}" y="{below}" width="{width - chart.gutter}" height="{chart.height}"'
    return "".join(drawn) + f"<svg {inside}>{chart.body}</svg>"


if __name__ == "__main__":
    main()
