"""Frame of a page: one self-contained HTML file, in light and dark colors, for any width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from .charts import Chart

COLORS = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1d2430; --soft: #5b6575; --line: #dfe3ea;
  --ours: #0b7a44; --band: #eef1f6; --band2: #f7f2ea; --mark: #c1121f; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171c; --ink: #e6e9ee; --soft: #9aa4b2;
  --line: #2c323b; --ours: #4cc38a; --band: #1c2129; --band2: #25211a; --mark: #ff7b6b; } }
"""
"""Colors of pages, and of pictures in separate files."""
CHART_STYLE = """
text { fill: var(--ink); font: 12.5px system-ui, sans-serif; } text.strong { font-weight: 700; }
text.soft { fill: var(--soft); font-size: 11.5px; } .grid { stroke: var(--line); }
.ink { stroke: var(--ink); stroke-width: 1.5; } .mark { stroke: var(--mark); stroke-width: 3; }
.line { fill: none; stroke-width: 2; } .phase { fill: var(--band); } .phase.backward { fill: var(--band2); }
.box { fill: none; stroke: var(--soft); } .rank { fill: var(--band); stroke: var(--soft); }
"""
STYLE = """
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1120px; margin: 0 auto; padding: 1.2rem 1rem 4rem; overflow-wrap: anywhere; }
h1 { font-size: clamp(1.4rem, 4.5vw, 2.1rem); line-height: 1.2; margin: .2rem 0 .6rem; }
h2 { margin: 2.4rem 0 .6rem; } .kicker, .note, figcaption small { color: var(--soft); }
.kicker { margin: 0; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
tr.ours td { font-weight: 600; color: var(--ours); } tr.baseline td { font-weight: 600; }
@media (max-width: 600px) { td:first-child { white-space: normal; min-width: 8.5rem; } }
.figures { display: grid; gap: 1rem 2.4rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
figure { margin: .8rem 0; min-width: 0; } figcaption { font-weight: 600; margin-bottom: .4rem; }
figcaption small { display: block; font-weight: 400; }
.plot { display: flex; } .plot > svg { flex: none; }
.plot > .scroll { flex: 1; min-width: 0; overflow-y: hidden; }
.plot svg { display: block; } .legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .85rem; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .35em; }
.zoom { font-size: .85rem; color: var(--soft); display: flex; align-items: center; gap: .5rem; }
[data-tip]:hover { filter: brightness(1.15); } .phase:hover { filter: none; }
.point { opacity: 0; } .point.few, .point:hover { opacity: 1; }
#tip { position: fixed; z-index: 1; pointer-events: none; max-width: 20rem; padding: .3rem .6rem;
  border-radius: 4px; background: var(--ink); color: var(--paper); font-size: .85rem; display: none; }
details > summary { cursor: pointer; }
"""
SCRIPT = """
const tip = document.getElementById("tip");
document.addEventListener("pointermove", event => {
  const text = event.target.closest?.("[data-tip]")?.dataset.tip;
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.max(0, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 4)) + "px";
  tip.style.top = Math.max(0, event.clientY - tip.offsetHeight - 12) + "px";
});
for (const zoom of document.querySelectorAll(".zoom input"))
  zoom.addEventListener("input", () => {
    zoom.closest("figure").querySelector(".scroll > svg").style.width = zoom.value + "%";
  });
"""
ZOOM = '<label class="zoom">zoom <input type="range" min="100" max="3000" value="100"></label>'


def page(title: str, headline: str, sections: Sequence[str]) -> str:
    """Return a page: the headline with the result in words, then sections of HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(f'{title}: {headline}')}</title><style>{COLORS}{CHART_STYLE}{STYLE}</style></head>"
        f'<body><p class="kicker">{escape(title)}</p><h1>{escape(headline)}</h1>{"".join(sections)}'
        f'<div id="tip"></div><script>{SCRIPT}</script></body></html>'
    )


def table(lines: list[list[str]], class_of: Callable[[str], str] = lambda _: "") -> str:
    """Return a table with a header and lines of text.

    `class_of` maps the first cell of a line to its CSS class. A table wider than the screen scrolls, and its
    first column stays in place."""
    head = "".join(f"<th>{escape(column)}</th>" for column in lines[0])
    body = "".join(
        f'<tr class="{class_of(line[0])}">' + "".join(f"<td>{escape(text)}</td>" for text in line) + "</tr>"
        for line in lines[1:]
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def figure(chart: Chart) -> str:
    """Return a chart with its title and legend."""
    note = f"<small>{escape(chart.note)}</small>" if chart.note else ""
    legend = "".join(
        f'<span><i style="background:{color}"></i>{escape(text)}</span>'
        for text, color in chart.legend.items()
    )
    labels = (
        f'<svg width="{chart.gutter}" height="{chart.height}">{chart.labels}</svg>' if chart.gutter else ""
    )
    return (
        f"<figure><figcaption>{escape(chart.title)}{note}</figcaption>"
        f'<div class="legend">{legend}</div>{ZOOM if chart.zooms else ""}<div class="plot">{labels}'
        f'<div class="scroll"><svg width="100%" height="{chart.height}">{chart.body}</svg></div></div>'
        "</figure>"
    )


def figures(*charts: Chart) -> str:
    """Return charts in a row, or below each other on a narrow screen."""
    return f'<div class="figures">{"".join(figure(chart) for chart in charts)}</div>'


def paragraph(text: str, style: str = "") -> str:
    return f'<p class="{style}">{escape(text)}</p>'


def items(sentences: Sequence[str]) -> str:
    """Return a list of sentences."""
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"
