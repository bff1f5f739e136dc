"""The benchmark's report: one HTML page that needs nothing else, with plotly's script inside."""

from __future__ import annotations

from html import escape
from typing import Any

from ..bench.profile import PARTS
from ..bench.results import Results, verdicts
from ..strategies import STRATEGIES
from .bench_tables import COLUMNS, EXPLANATION, colors, main_lines, parts_lines, style_of
from .page import HEIGHT, Figures, graph_objects, page, table


def render_bench(results: Results) -> str:
    """The page of a whole run."""
    figures = Figures()
    sections = [_summary(results)]
    for micro_batches in results.micro_batches():
        plural = "es" if micro_batches > 1 else ""
        sections += [
            f"<h2>{micro_batches} micro-batch{plural} per optimizer step</h2>",
            table([list(COLUMNS), *main_lines(results, micro_batches)], _class_of),
            figures.add(_step_figure(results, micro_batches)),
            figures.add(_parts_figure(results, micro_batches)),
            table(parts_lines(results, micro_batches), _class_of),
        ]
    sections += ["<h2>Bytes across nodes</h2>", figures.add(_bytes_figure(results))]
    sections += ["<h2>Memory</h2>", figures.add(_memory_figure(results))]
    if results.losses:
        sections += ["<h2>Losses</h2>", figures.add(_loss_figure(results))]
    return page("zeropp lab bench", results.describe(), sections)


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


def _class_of(title: str) -> str:
    return {"bold green": "ours", "bold": "baseline", "": ""}[style_of(title)]


def _step_figure(results: Results, micro_batches: int) -> Any:
    """Median step times, with the limit of each strategy as a mark."""
    go = graph_objects()
    cells = [(strategy.title, cell) for strategy, cell in results.measured(micro_batches)]
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
    go = graph_objects()
    cells = [(strategy.title, cell) for strategy, cell in results.measured(micro_batches)]
    figure = go.Figure()
    for part in PARTS:
        values = [cell.parts_ms.get(part, 0.0) for _, cell in cells]
        if any(values):
            # plotly has ten colors and there are more parts: compute gets one that is not among them.
            color = "#8d96a5" if part == "compute" else None
            titles = [title for title, _ in cells]
            figure.add_bar(y=titles, x=values, orientation="h", name=part, marker_color=color)
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
    go = graph_objects()
    figure = go.Figure()
    for micro_batches in results.micro_batches():
        cells = [(strategy.title, cell) for strategy, cell in results.measured(micro_batches)]
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
    go = graph_objects()
    figure = go.Figure()
    for strategy in STRATEGIES:
        if strategy.name in results.losses:
            figure.add_scatter(y=results.losses[strategy.name], mode="lines", name=strategy.title)
    if results.other_seed_losses:
        figure.add_scatter(
            y=results.other_seed_losses, mode="lines", name="baseline, another seed", line={"dash": "dot"}
        )
    figure.update_layout(title="Loss per step, one micro-batch", height=HEIGHT, xaxis_title="step")
    return figure
