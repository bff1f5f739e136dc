from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.bench.samples import sample_results
from zeropp.tools.cli import main


def test_lab_bench_shows_an_earlier_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers, report = tmp_path / "numbers.json", tmp_path / "report.html"
    sample_results().save(numbers)
    assert main(["lab", "bench", "--show", str(numbers), "--html", str(report)]) == 0
    shown = capsys.readouterr().out
    assert "3.50x" in shown
    assert "faster than our default" in shown
    assert report.read_text().startswith("<!doctype html>")


def test_lab_bench_checks_its_output_folder_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "bench", "--json", "nowhere/bench.json"]) == 1
    assert "nowhere/bench.json cannot be written" in capsys.readouterr().err


def test_a_strategy_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "bench", "--strategies", "default", "qwx"]) == 1
    assert "strategy is 'qwx'; expected one of fsdp2, wire16" in capsys.readouterr().err
