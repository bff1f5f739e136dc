"""Every page in a real browser: its contents at two widths, in light and dark, and the console."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.browser import CHROMIUM, WHY_NOT, WIDTHS, open_pages
from tests.tools.bench.samples import sample_results
from tests.tools.pages.test_traffic import sample_ledger, sample_page
from tests.tools.report.test_compare import write_run
from tests.tools.report.test_doctor import DIAGNOSIS
from tests.tools.report.test_plan import sample_plan
from zeropp.tools.bench.results import Results
from zeropp.tools.report import render_bench
from zeropp.tools.report.compare import read_runs
from zeropp.tools.report.compare_page import render_compare
from zeropp.tools.report.doctor import render_doctor, verdict
from zeropp.tools.report.plan_page import render_plan

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)

WRONG = """<!doctype html><body style="background: white; margin: 0"><h1 style="width: 2000px">wide</h1>
<div class="plot"><svg width="200" height="50"><text x="0" y="20">one</text><text x="5" y="20">other</text>
<text x="180" y="40">clipped here</text><rect width="nan%" height="1"/></svg></div>
<script>missing()</script></body>"""
PAGES = ("bench", "compare", "doctor", "plan", "traffic")
PICTURES = sorted((Path(__file__).parents[3] / "docs" / "pictures").glob("*.svg"))


class Opened(NamedTuple):
    light: dict[str, Any]
    dark: dict[str, Any]
    console: list[str]
    """Messages of all pages but the wrong one."""
    complaints: list[str]
    """Messages of the wrong page."""
    numbers: dict[str, Any]
    """Numbers of the pages, as JSON."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    folder = tmp_path_factory.mktemp("pages")
    sample_results().save(folder / "bench.json")
    plan = sample_plan()
    plan.save(folder / "plan.json")
    runs = [
        write_run(folder / name, *run) for name, run in {"plain": (16.0, 2.0), "ours": (0.8, 1.99)}.items()
    ]
    pages = {
        "bench": render_bench(Results.load(folder / "bench.json")),
        "compare": render_compare(read_runs(runs)),
        "doctor": render_doctor(DIAGNOSIS),
        "plan": render_plan(plan),
        "traffic": sample_page(),
    }
    pictures = {
        f"{path.stem}-picture": f'<!doctype html><h1>picture</h1><div class="plot">{path.read_text()}</div>'
        for path in PICTURES
    }
    light, console = open_pages(pages | pictures, folder)
    wrong, complaints = open_pages({**pages, "wrong": WRONG}, folder, dark=True)
    numbers = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("bench", "plan")}
    return Opened(light, wrong, console, complaints, numbers)


def test_no_page_logs_an_error(opened: Opened) -> None:
    assert opened.console == []
    assert [line for line in opened.complaints if "wrong.html" not in line] == []


@pytest.mark.parametrize("width", [str(width) for width in WIDTHS])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_its_width(opened: Opened, name: str, width: str) -> None:
    found = opened.light[name][width]
    assert found["overflow"] == 0
    assert found["clipped"] == []
    assert found["collide"] == []


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_cuts_nothing_off(opened: Opened, path: Path) -> None:
    assert opened.light[f"{path.stem}-picture"]["1280"]["clipped"] == []


@pytest.mark.parametrize("name", PAGES)
def test_words_then_a_picture_then_a_table(opened: Opened, name: str) -> None:
    found = opened.light[name]["1280"]
    assert found["order"][:2] == ["H1", "FIGURE"]
    shown, tip = found["tip"]
    assert shown == tip != ""
    assert opened.light[name]["1280"]["background"] == "rgb(255, 255, 255)"
    assert opened.dark[name]["1280"]["background"] == "rgb(20, 23, 28)"


def test_errors_of_a_wrong_page_are_found(opened: Opened) -> None:
    """This page shows that the other tests can fail."""
    narrow = opened.dark["wrong"]["390"]
    assert narrow["overflow"] > 1000
    assert narrow["clipped"] == ["clipped here"]
    assert narrow["collide"] == ["one / other"]
    assert any("missing is not defined" in line for line in opened.complaints)
    assert any("nan%" in line for line in opened.complaints)


def widths(bars: list[list[Any]]) -> list[float]:
    return [width for width, _ in bars]


def in_proportion(shown: list[float], values: list[float]) -> None:
    """Assert that widths are proportional to values, within a pixel."""
    assert shown == pytest.approx([max(shown) * value / max(values) for value in values], abs=1.0)


def test_bench_shows_the_numbers_of_its_json(opened: Opened) -> None:
    found, numbers = opened.light["bench"]["1280"], opened.numbers["bench"]
    cells = [cell for cell in numbers["cells"] if cell["micro_batches"] == 1]
    header, *rows = found["tables"][0]
    shown = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    ours = next(cell for cell in cells if cell["strategy"] == "default")
    line = shown["zeropp's default"]
    assert line["bytes"].split()[0] == f"{ours['sent_bytes'] / numbers['parameters']:.2f}"
    assert line["step ms"].split()[0] == f"{sorted(ours['step_ms'])[1]:.0f}"
    assert line["peak MiB"] == f"{ours['peak_bytes'] / 2**20:.0f}"
    in_proportion(widths(found["bars"][0]), [sorted(cell["step_ms"])[1] for cell in cells])
    in_proportion(widths(found["bars"][1]), [cell["sent_bytes"] for cell in cells])
    assert "3.50x" in found["headline"]


def test_doctor_shows_the_numbers_of_its_steps(opened: Opened) -> None:
    found, steps = opened.light["doctor"]["1280"], DIAGNOSIS.steps
    assert [row[:2] for row in found["tables"][0][1:]] == [[s.name, f"{s.milliseconds:,.1f}"] for s in steps]
    in_proportion(widths(found["bars"][0]), [step.milliseconds for step in steps])
    assert found["headline"] == verdict(DIAGNOSIS)


def test_plan_shows_the_numbers_of_its_json(opened: Opened) -> None:
    found, numbers = opened.light["plan"]["1280"], opened.numbers["plan"]
    options = numbers["options"]
    for row, option in zip(found["tables"][0][1:], options, strict=True):
        assert row[:2] == [option["title"], f"{option['step_seconds'] * 1e3:,.1f}"]
        assert row[2] == f"{option['tokens_per_second']:,.0f}"
    in_proportion(widths(found["bars"][1]), [option["step_seconds"] for option in options])
    in_proportion(widths(found["bars"][2]), [option["across_bytes"] for option in options])
    assert f"{options[1]['step_seconds'] / options[0]['step_seconds']:.2f}x" in found["headline"]
    assert found["zoom"] == pytest.approx(10, rel=0.01)


def test_timelines_have_the_lengths_of_their_operations(opened: Opened) -> None:
    """The bar and its tip show the duration of an operation, not its end."""
    plan = sample_plan()
    plain = next(planned for planned in plan.strategies if planned.strategy.name == "fsdp2")
    ops = [op for op in plain.timeline.ops if op.kind == "compute" and op.phase != "optimizer"]
    drawn = [
        bar for bar in opened.light["plan"]["1280"]["bars"][0] if bar[1].startswith(("forward", "backward"))
    ]
    assert 0 < len(ops) < len(drawn)  # the other step is below
    for op, (_, tip) in zip(ops, drawn, strict=False):
        assert tip == f"{op.name}: {op.seconds * 1e3:,.4g} ms from {op.start * 1e3:,.4g} ms"
    in_proportion([width for width, _ in drawn[: len(ops)]], [op.seconds for op in ops])


def test_compare_shows_the_numbers_of_its_runs(opened: Opened) -> None:
    found = opened.light["compare"]["390"]
    header, plain, ours = found["tables"][0]
    assert dict(zip(header, ours, strict=True))["validation loss"] == "1.9900"
    assert dict(zip(header, plain, strict=True))["per parameter"] == "16.00"
    assert found["headline"] == "ours: 20x fewer bytes across nodes than plain, same loss (-0.50%)"
    in_proportion(widths(found["bars"][0]), [16.0, 0.8])


def test_traffic_shows_the_numbers_of_the_ledger(opened: Opened) -> None:
    found = opened.light["traffic"]["1280"]
    sent = {(key.unit, key.collective, key.hop): traffic for key, traffic in sample_ledger().rows()}
    rows = found["tables"][1][1:]
    assert [tuple(row[:3]) for row in rows] == list(sent)
    assert [row[4] for row in rows] == [f"{traffic.wire_bytes:,}" for traffic in sent.values()]
    totals = sample_ledger()
    in_proportion(
        widths(found["bars"][1]),
        [totals.baseline_total().across_bytes, totals.total().across_bytes],
    )
