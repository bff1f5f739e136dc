"""The benchmark as one HTML file that needs nothing else: plotly's script is inside."""

from __future__ import annotations

from html import escape
from typing import Any

from ..lab.results import Results, verdicts
from ..lab.rows import ROWS
from ..lab.timeline import PARTS
from .tables import COLUMNS, EXPLANATION, colors, main_rows, parts_rows, style_of

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2430; }
body { max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #dfe3ea; }
th:first-child, td:first-child { text-align: left; }
tr.ours td { font-weight: 600; color: #1c7a45; } tr.baseline td { font-weight: 600; }
p.note { color: #5b6575; }
"""
HEIGHT = 460


def render_html(results: Results) -> str:
    """A report of the whole run, as a string."""
    figures = _Figures()
    sections = [_summary(results)]
    for micro_batches in results.micro_batches():
        plural = "es" if micro_batches > 1 else ""
        sections += [
            f"<h2>{micro_batches} micro-batch{plural} per optimizer step</h2>",
            _table([list(COLUMNS), *main_rows(results, micro_batches)]),
            figures.add(_step_figure(results, micro_batches)),
            figures.add(_parts_figure(results, micro_batches)),
            _table(parts_rows(results, micro_batches)),
        ]
    sections += ["<h2>Bytes across nodes</h2>", figures.add(_bytes_figure(results))]
    sections += ["<h2>Memory</h2>", figures.add(_memory_figure(results))]
    if results.losses:
        sections += ["<h2>Losses</h2>", figures.add(_loss_figure(results))]
    title = f"zeropp lab bench: {results.describe()}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>zeropp lab bench</h1>{''.join(sections)}</body></html>"
    )


class _Figures:
    """Turns figures into HTML; the first one brings plotly's script."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, figure: Any) -> str:
        self._count += 1
        text: str = figure.to_html(
            full_html=False, include_plotlyjs=self._count == 1, div_id=f"figure-{self._count}"
        )
        return text


def _graph_objects() -> Any:
    try:
        import plotly.graph_objects as graph_objects  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ValueError("the HTML report needs the package plotly: pip install 'zeropp[plots]'") from None
    return graph_objects


def _summary(results: Results) -> str:
    found = "".join(f"<li>{escape(sentence)}</li>" for sentence in verdicts(results))
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    size = results.workload
    model = (
        f"{size.layers} layers of width {size.width}, {size.batch} x {size.context} bytes per rank and "
        f"micro-batch, seed {size.seed}; {versions}; took {results.seconds / 60:.0f} minutes"
    )
    return (
        f"<p>{escape(results.describe())}.<br>{escape(model)}.</p><h2>What a reader should know</h2>"
        f'<ul>{found}</ul><p class="note">{escape(EXPLANATION)}</p>'
    )


def _table(lines: list[list[str]]) -> str:
    classes = {"bold green": "ours", "bold": "baseline", "": ""}
    head = "".join(f"<th>{escape(column)}</th>" for column in lines[0])
    body = "".join(
        f'<tr class="{classes[style_of(line[0])]}">'
        + "".join(f"<td>{escape(text)}</td>" for text in line)
        + "</tr>"
        for line in lines[1:]
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _step_figure(results: Results, micro_batches: int) -> Any:
    """Median step times, with the limit of each row as a mark."""
    go = _graph_objects()
    cells = [(row.title, c) for row in ROWS if (c := results.cell(row.name, micro_batches)) is not None]
    titles = [title for title, _ in cells]
    figure = go.Figure()
    figure.add_bar(
        y=titles,
        x=[cell.median_ms for _, cell in cells],
        error_x={"type": "data", "array": [cell.median_ms * cell.spread for _, cell in cells]},
        orientation="h",
        marker_color=[colors()[title] for title in titles],
        name="step",
    )
    figure.add_scatter(
        y=titles,
        x=[results.limit_ms(cell) for _, cell in cells],
        mode="markers",
        marker={"symbol": "line-ns-open", "size": 22, "color": "#c1121f", "line": {"width": 3}},
        name="limit",
    )
    figure.update_layout(title="Step time (ms)", height=HEIGHT, margin={"l": 260})
    figure.update_yaxes(autorange="reversed")
    return figure


def _parts_figure(results: Results, micro_batches: int) -> Any:
    go = _graph_objects()
    cells = [(row.title, c) for row in ROWS if (c := results.cell(row.name, micro_batches)) is not None]
    figure = go.Figure()
    for part in PARTS:
        values = [cell.parts_ms.get(part, 0.0) for _, cell in cells]
        if any(values):
            figure.add_bar(y=[title for title, _ in cells], x=values, orientation="h", name=part)
    figure.update_layout(title="Where the time goes (ms)", barmode="stack", height=HEIGHT, margin={"l": 260})
    figure.update_yaxes(autorange="reversed")
    return figure


def _bytes_figure(results: Results) -> Any:
    """Sent per node and parameter, for each number of micro-batches, on a logarithmic scale."""
    return _grouped_figure(
        results,
        "Bytes sent per node, parameter and step",
        lambda cell: cell.sent_bytes / results.parameters,
        log=True,
    )


def _memory_figure(results: Results) -> Any:
    return _grouped_figure(
        results, "Peak resident memory of a rank (MiB)", lambda cell: cell.peak_bytes / 2**20, log=False
    )


def _grouped_figure(results: Results, title: str, value: Any, *, log: bool) -> Any:
    go = _graph_objects()
    figure = go.Figure()
    for micro_batches in results.micro_batches():
        cells = [(row.title, c) for row in ROWS if (c := results.cell(row.name, micro_batches)) is not None]
        figure.add_bar(
            x=[title for title, _ in cells],
            y=[value(cell) for _, cell in cells],
            name=f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}",
        )
    figure.update_layout(title=title, barmode="group", height=HEIGHT + 80)
    if log:
        figure.update_yaxes(type="log")
    return figure


def _loss_figure(results: Results) -> Any:
    go = _graph_objects()
    figure = go.Figure()
    for row in ROWS:
        if row.name in results.losses:
            figure.add_scatter(y=results.losses[row.name], mode="lines", name=row.title)
    if results.other_seed_losses:
        figure.add_scatter(
            y=results.other_seed_losses, mode="lines", name="baseline, another seed", line={"dash": "dot"}
        )
    figure.update_layout(title="Loss per step, one micro-batch", height=HEIGHT, xaxis_title="step")
    return figure
