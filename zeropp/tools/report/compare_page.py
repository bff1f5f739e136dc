"""Comparison of training runs as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ... import Config
from ..._text import count
from ..pages import Bar, BarPart, Chart, Line, bars, colors_of, figure, figures, lines, page, paragraph, table
from ..strategies import DEFAULT, STRATEGIES
from ..train.metrics import Metrics
from .compare import EXPLANATION, bytes_per_node, compare_lines, differences

SAME = 0.01
"""Relative difference of validation losses below which the headline calls them the same."""
COMPILER = (
    "On a CPU, the peak of a run with codecs includes the compiler of their kernels, numba and LLVM: about "
    "110 MiB in every rank, or 180 MiB in the rank that compiles them first, for any model. The state of "
    "zeropp has a separate column."
)


def render_compare(runs: Mapping[str, Metrics], title: str = "zeropp compare") -> str:
    """Return a page with the result in words, charts, the table, and a description of each run."""
    colors = dict(zip(runs, colors_of(strategy_of(run) for run in runs.values()), strict=True))
    sections = [figures(bytes_chart(runs, colors), loss_chart(runs, colors))]
    sections += [
        table(compare_lines(runs), lambda name: _class_of(runs, name)),
        *(paragraph(f"{sentence}.") for sentence in differences(runs)),
        paragraph(EXPLANATION + ".", "note"),
    ]
    if any(run.info.device.startswith("cpu") and strategy_of(run) != "fsdp2" for run in runs.values()):
        sections.append(paragraph(COMPILER, "note"))
    if any(run.evaluations for run in runs.values()):
        sections += ["<h2>Validation loss</h2>", figure(validation_chart(runs, colors))]
    sections += ["<h2>The runs</h2>", *(paragraph(text) for text in _describe(runs))]
    return page(title, headline(runs), sections)


def headline(runs: Mapping[str, Metrics]) -> str:
    """Return the result in words: the last run against the first."""
    (first_name, first), (name, run) = next(iter(runs.items())), list(runs.items())[-1]
    if run is first:
        return f"{first_name}: loss {first.steps[-1].loss:.4f} after {first.steps[-1].step} steps"
    sent, sent_first = bytes_per_node(run), bytes_per_node(first)
    parts = []
    if sent and sent_first:
        ratio = sent_first / sent
        more = f"{ratio:.3g}x fewer" if ratio >= 1 else f"{1 / ratio:.3g}x more"
        parts.append(f"{more} bytes across nodes than {first_name}")
    if run.evaluations and first.evaluations:
        change = run.evaluations[-1].validation_loss / first.evaluations[-1].validation_loss - 1
        parts.append(f"same loss ({change:+.2%})" if abs(change) < SAME else f"loss {change:+.2%}")
    return f"{name}: {', '.join(parts) or 'nothing to compare'}"


def strategy_of(run: Metrics) -> str | None:
    """Return the name of the run's strategy, for any node_size, or None if its Config has no name."""
    config = run.info.config["zeropp"]
    if config == "auto":
        return "auto"
    known = {"fsdp2": Config.off()} | {s.name: s.config for s in STRATEGIES if s.config and s.is_ours}
    return next((name for name, preset in known.items() if _same(asdict(preset), config)), None)


def _same(preset: dict[str, Any], config: dict[str, Any]) -> bool:
    return {**preset, "node_size": None} == {**config, "node_size": None}


def _class_of(runs: Mapping[str, Metrics], name: str) -> str:
    return "ours" if strategy_of(runs[name]) == DEFAULT else ""


def _describe(runs: Mapping[str, Metrics]) -> list[str]:
    """Describe the model, the ranks and the Config of each run."""
    texts = []
    for name, run in runs.items():
        versions = ", ".join(f"{package} {number}" for package, number in run.info.versions.items())
        config = run.info.config["zeropp"]
        sends = (
            config
            if isinstance(config, str)
            else ", ".join(f"{key} {value}" for key, value in config.items())
        )
        texts.append(
            f"{name}: {run.info.parameters:,} parameters, {count(run.info.ranks, 'rank')} on "
            f"{count(run.info.nodes, 'node')}, {run.info.device}, {versions}; zeropp: {sends}"
        )
    return texts


def bytes_chart(runs: Mapping[str, Metrics], colors: Mapping[str, str]) -> Chart:
    rows = []
    for name, run in runs.items():
        sent = bytes_per_node(run)
        each = sent / run.info.parameters
        part = BarPart(each, colors[name], f"{name}: {sent:,.0f} bytes a node and step")
        rows.append(Bar(name, f"{each:.2f}", (part,), strategy_of(run) == DEFAULT))
    return bars("Bytes across nodes, per node, parameter and step", rows, "bytes per parameter")


def loss_chart(runs: Mapping[str, Metrics], colors: Mapping[str, str]) -> Chart:
    drawn = [
        Line(name, colors[name], [(float(record.step), record.loss) for record in run.steps])
        for name, run in runs.items()
    ]
    return lines("Training loss", drawn, "step", "loss")


def validation_chart(runs: Mapping[str, Metrics], colors: Mapping[str, str]) -> Chart:
    drawn = [
        Line(name, colors[name], [(float(found.step), found.validation_loss) for found in run.evaluations])
        for name, run in runs.items()
        if run.evaluations
    ]
    return lines("Validation loss", drawn, "step", "loss")
