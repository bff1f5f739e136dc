"""`zeropp compare` on metrics files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.report.test_compare import write_run
from zeropp.tools.cli import main


def test_a_table_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, ours = write_run(tmp_path / "plain", 16.0, 2.0), write_run(tmp_path / "ours", 0.8, 2.01)
    page = tmp_path / "compare.html"
    assert main(["compare", str(plain), str(ours / "metrics.jsonl"), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    (line,) = (line for line in shown.splitlines() if "ours" in line and "│" in line)
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells[0] == "ours"
    assert cells[3:5] == ["2.0100", "+0.50%"]
    assert cells[6:8] == ["0.80", "20.0x"]
    assert page.read_text().startswith("<!doctype html>")
    assert "the runs differ" not in shown
    other = write_run(tmp_path / "other", 0.8, 2.01, ranks=8)
    assert main(["compare", str(plain), str(other), "--html", str(page)]) == 0
    assert "- the runs differ in ranks: plain 4, other 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no run is given"),
        (["nowhere.jsonl"], "nowhere.jsonl cannot be read"),
    ],
)
def test_bad_input_is_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *arguments, "--html", str(tmp_path / "c.html")]) == 1
    assert message in capsys.readouterr().err


def test_the_page_is_checked_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = write_run(tmp_path / "plain", 16.0, 2.0)
    assert main(["compare", str(plain), "--html", str(tmp_path / "no" / "c.html")]) == 1
    assert "c.html cannot be written" in capsys.readouterr().err
