"""Report of the benchmark as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable

from ..bench.profile import PARTS
from ..bench.results import Cell, Results, verdicts
from ..pages import (
    PART_COLORS,
    STRATEGY_COLORS,
    Bar,
    BarPart,
    Chart,
    Line,
    bars,
    figure,
    figures,
    items,
    lines,
    page,
    paragraph,
    table,
)
from ..strategies import BASELINE, DEFAULT, STRATEGIES, Strategy
from .bench_tables import COLUMNS, EXPLANATION, main_lines, parts_lines, style_of

MIB = 2**20


def render_bench(results: Results) -> str:
    """Return the page of a benchmark."""
    sections = [paragraph(f"{results.describe()}.")]
    for count in results.micro_batches():
        sections += [
            f"<h2>{_per_step(count)}</h2>",
            figures(step_chart(results, count), bytes_chart(results, count)),
            table([list(COLUMNS), *main_lines(results, count)], _class_of),
        ]
    sections += [
        "<h2>Conclusions</h2>",
        items(verdicts(results)),
        paragraph(f"{EXPLANATION}.", "note"),
    ]
    if results.losses:
        sections += ["<h2>Losses</h2>", figure(loss_chart(results))]
    sections.append("<h2>Where the time goes</h2>")
    for count in results.micro_batches():
        sections += [figure(parts_chart(results, count)), table(parts_lines(results, count), _class_of)]
    sections += ["<h2>Memory</h2>", figures(*(memory_chart(results, n) for n in results.micro_batches()))]
    return page("zeropp lab bench", headline(results), [*sections, _how(results)])


def headline(results: Results) -> str:
    """Return the result in words: zeropp's default against the baseline, and any faster strategy."""
    pairs = [
        (ours, theirs)
        for count in results.micro_batches()
        if (ours := results.cell(DEFAULT, count)) and (theirs := results.cell(BASELINE, count))
    ]
    if not pairs:
        return "Strategies on one cluster, without a comparison: the default or the baseline was not run"
    speed = _range([theirs.median_ms / ours.median_ms for ours, theirs in pairs], "{:.2f}x")
    fewer = _range(
        [theirs.sent_bytes / ours.sent_bytes for ours, theirs in pairs if ours.sent_bytes], "{:.3g}x"
    )
    result = f"{speed} the throughput of 16-bit FSDP2, {fewer} fewer bytes across nodes"
    return f"{result}{_loss_in_words(results)}{_faster(results)}"


def _loss_in_words(results: Results) -> str:
    ours, theirs, noise = results.final_loss(DEFAULT), results.final_loss(BASELINE), results.loss_noise()
    if ours is None or theirs is None:
        return ""
    if noise is not None and abs(ours - theirs) <= noise:
        return ", same loss"
    return f", loss {ours - theirs:+.4f}"


def _faster(results: Results) -> str:
    """Name the strategies that are faster than the default."""
    sentences = {}
    for count in results.micro_batches():
        cells = [(strategy, cell) for strategy, cell in results.measured(count) if cell.step_ms]
        strategy, _ = min(cells, key=lambda pair: pair[1].median_ms)
        if strategy.name != DEFAULT:
            sentences[strategy.title] = f"{strategy.title} is faster with {_per_step(count)}"
    return "".join(f"; {sentence}" for sentence in sentences.values())


def _range(values: list[float], form: str) -> str:
    """Format the smallest and the largest value.

    >>> _range([2.61, 3.07], "{:.1f}x"), _range([2.0], "{:.1f}x")
    ('2.6x to 3.1x', '2.0x')
    """
    ends = list(dict.fromkeys(form.format(value) for value in (min(values), max(values))))
    return " to ".join(ends)


def _per_step(count: int) -> str:
    return f"{count} micro-batch{'es' if count > 1 else ''} per step"


def _class_of(title: str) -> str:
    return {"bold green": "ours", "bold": "baseline", "": ""}[style_of(title)]


def _chart(
    results: Results,
    count: int,
    title: str,
    unit: str,
    row_of: Callable[[Strategy, Cell], Bar],
    note: str = "",
) -> Chart:
    rows = [row_of(strategy, cell) for strategy, cell in results.measured(count)]
    return bars(title, rows, unit, note=note)


def step_chart(results: Results, count: int) -> Chart:
    """Chart the median step times, with the limit of each strategy as a mark."""

    def row(strategy: Strategy, cell: Cell) -> Bar:
        speedup, limit = results.speedup(cell), results.limit_ms(cell)
        text = _duration(cell.median_ms) + ("" if speedup is None else f", {speedup:.2f}x")
        tip = f"{strategy.title}: {cell.median_ms:,.0f} ms a step, limit {limit:,.0f} ms"
        part = BarPart(cell.median_ms, STRATEGY_COLORS[strategy.name], tip)
        is_ours = strategy.name == DEFAULT
        return Bar(strategy.title, text, (part,), is_ours, cell.median_ms * cell.spread, limit)

    note = "Shorter is better. x: throughput relative to the baseline; red: limit; black: middle half."
    return _chart(results, count, "Time of a step (ms)", "ms", row, note)


def _duration(step_ms: float) -> str:
    """Format a step time.

    >>> _duration(275.2), _duration(1275.2), _duration(27_238.0)
    ('275 ms', '1.28 s', '27.2 s')
    """
    return f"{step_ms:.3g} ms" if step_ms < 1000 else f"{step_ms / 1e3:,.3g} s"


def bytes_chart(results: Results, count: int) -> Chart:
    def row(strategy: Strategy, cell: Cell) -> Bar:
        each = cell.sent_bytes / results.parameters
        tip = f"{strategy.title}: {cell.sent_bytes:,.0f} bytes a node and step"
        part = BarPart(each, STRATEGY_COLORS[strategy.name], tip)
        return Bar(strategy.title, f"{each:.2f}", (part,), strategy.name == DEFAULT)

    title = "Bytes across nodes per parameter and step"
    note = "Sent by one node, from the interface counters."
    return _chart(results, count, title, "bytes per parameter", row, note)


def memory_chart(results: Results, count: int) -> Chart:
    def row(strategy: Strategy, cell: Cell) -> Bar:
        part = BarPart(
            cell.peak_bytes / MIB,
            STRATEGY_COLORS[strategy.name],
            f"{strategy.title}: {cell.model_state_bytes / MIB:,.0f} MiB of it model state, "
            f"{cell.communication_bytes / MIB:,.0f} MiB communication state",
        )
        return Bar(strategy.title, f"{cell.peak_bytes / MIB:,.0f} MiB", (part,), strategy.name == DEFAULT)

    return _chart(results, count, f"Peak resident memory of a rank, {_per_step(count)}", "MiB", row)


def parts_chart(results: Results, count: int) -> Chart:
    cells = results.measured(count)
    used = [part for part in PARTS if any(cell.parts_ms.get(part) for _, cell in cells)]
    rows = [
        Bar(
            strategy.title,
            f"{sum(cell.parts_ms.values()):,.0f} ms",
            tuple(
                BarPart(
                    cell.parts_ms.get(part, 0.0),
                    PART_COLORS[part],
                    f"{strategy.title}, {part}: {cell.parts_ms.get(part, 0.0):,.1f} ms",
                )
                for part in used
                if cell.parts_ms.get(part)
            ),
            strategy.name == DEFAULT,
        )
        for strategy, cell in cells
    ]
    title = f"One profiled step by its parts, {_per_step(count)}"
    note = "Parts of overlapped strategies run concurrently with compute: their sum exceeds the step time."
    return bars(title, rows, "ms", {part: PART_COLORS[part] for part in used}, note)


def loss_chart(results: Results) -> Chart:
    drawn = [
        Line(strategy.title, STRATEGY_COLORS[strategy.name], _numbered(results.losses[strategy.name]))
        for strategy in STRATEGIES
        if strategy.name in results.losses
    ]
    if results.other_seed_losses:
        color = STRATEGY_COLORS[BASELINE]
        drawn.append(Line("baseline, another seed", color, _numbered(results.other_seed_losses), dotted=True))
    return lines("Loss per step, one micro-batch", drawn, "step", "loss")


def _numbered(losses: list[float]) -> list[tuple[float, float]]:
    return [(float(step), loss) for step, loss in enumerate(losses, 1)]


def _how(results: Results) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    size = results.workload
    return "<h2>Measurement</h2>" + paragraph(
        f"{size.layers} layers of width {size.width}, {size.batch} x {size.context} bytes per rank and "
        f"micro-batch, seed {size.seed}; {versions}; took {results.seconds / 60:.0f} minutes."
    )
