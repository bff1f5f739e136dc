"""Report of the doctor, as rich tables and as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape as escape_markup
from rich.table import Table

from ..doctor.check import CheckReport, State, StepTime
from ..doctor.hardware import TOO_FAST_NS
from ..doctor.run import Diagnosis
from ..pages import Bar, BarPart, Chart, bars, colors_of, figure, items, page, paragraph, table
from ..plan.hardware import Hardware
from ..plan.recommend import PLAIN_NAMES, find_compared
from ..strategies import DEFAULT, PRESETS, preset_code
from .bench_tables import as_table

COLORS: dict[State, str] = {"ok": "green", "not run": "dim", "warning": "yellow", "fault": "bold red"}
STRATEGY_NAMES: dict[str, str] = {
    **{find_compared(name).title: name for name in PLAIN_NAMES},
    **{preset_code(name): name for name in PRESETS},
}
"""Name of the strategy of each step time, for its color."""
LINK_COLUMNS = ("", "latency us", "GB/s")
STEP_COLUMNS = ("", "step ms", "throughput", "MB across", "hidden")
EXPLANATION = (
    "step: median of the slowest rank. throughput: relative to plain FSDP2 in steps of the same round; "
    "Config.off() is plain FSDP2, too, so its difference from 1 is noise. MB across: sent by a node to "
    "others in a step. hidden: fraction of the communication time that is hidden behind compute"
)


def doctor_tables(diagnosis: Diagnosis) -> list[Table]:
    """Return tables of the checks, and, with the speed part, of links and step times."""
    checks = Table(title=f"zeropp doctor: {diagnosis.subject}")
    for column in ("", "check", "result -> advice"):
        checks.add_column(column, overflow="fold")
    for result in diagnosis.results:
        state = f"[{COLORS[result.state]}]{result.state}[/]"
        saw = f"{result.saw} -> {result.advice}" if result.advice else result.saw
        checks.add_row(state, f"{result.part}: {result.name}", escape_markup(saw))
    tables = [checks]
    if diagnosis.hardware is not None:
        tables += [as_table("time of a collective: latency + bytes / rate", link_lines(diagnosis.hardware))]
    if diagnosis.steps:
        tables += [as_table("step times", step_lines(diagnosis.steps))]
    return tables


def link_lines(hardware: Hardware) -> list[list[str]]:
    """Return a header, and the latency and rate of every collective, per rank."""
    return [list(LINK_COLUMNS)] + [
        [name, f"{cost.latency_us:,.0f}", f"{1 / max(cost.ns_per_byte, TOO_FAST_NS):,.3g}"]
        for name, cost in hardware.measured.items()
    ]


def step_lines(steps: list[StepTime]) -> list[list[str]]:
    return [list(STEP_COLUMNS)] + [
        [
            step.name,
            f"{step.milliseconds:,.1f}",
            f"{step.speedup:.2f}x",
            "" if step.across_bytes is None else f"{step.across_bytes / 1e6:,.2f}",
            "" if step.hidden is None else f"{step.hidden:.0%}",
        ]
        for step in steps
    ]


def verdict(diagnosis: Diagnosis) -> str:
    """Return one line with the number of faults."""
    counts = {state: [r for r in diagnosis.results if r.state == state] for state in COLORS}
    if faults := counts["fault"]:
        names = ", ".join(f"{result.part}: {result.name}" for result in faults)
        return f"{len(faults)} of {len(diagnosis.results)} checks found a fault: {names}"
    texts = [f"{len(found)} {state}" for state, found in counts.items() if found]
    return f"no faults: {', '.join(texts)}"


def render_doctor(diagnosis: Diagnosis) -> str:
    """Return a page with the verdict, the advice, step times, links, and every check."""
    sections = [figure(step_chart(diagnosis.steps))] if diagnosis.steps else []
    sections += [items(diagnosis.advice), paragraph(f"{diagnosis.subject}.")]
    if diagnosis.steps:
        sections += [table(step_lines(diagnosis.steps)), paragraph(f"{EXPLANATION}.", "note")]
    if diagnosis.hardware is not None:
        sections += ["<h2>Links</h2>", table(link_lines(diagnosis.hardware))]
    columns = ["check", "", "description", "result", "advice", "seconds"]
    sections += ["<h2>Checks</h2>", table([columns, *map(_line, diagnosis.results)])]
    return page("zeropp doctor", verdict(diagnosis), sections)


def step_chart(steps: Sequence[StepTime]) -> Chart:
    rows = []
    for step, color in zip(steps, colors_of(STRATEGY_NAMES.get(step.name) for step in steps), strict=True):
        part = BarPart(
            step.milliseconds, color, f"{step.name}: {step.speedup:.2f}x the throughput of plain FSDP2"
        )
        is_ours = STRATEGY_NAMES.get(step.name) == DEFAULT
        rows.append(Bar(step.name, f"{step.milliseconds:,.1f} ms", (part,), is_ours))
    return bars("Time of a step (ms)", rows, "ms", note="Shorter is better.")


def _line(result: CheckReport) -> list[str]:
    name = f"{result.part}: {result.name}"
    return [name, result.state, result.does, result.saw, result.advice, f"{result.seconds:.1f}"]
