"""`zeropp demo`, which `make train` runs, with few steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zeropp.tools.cli import main
from zeropp.tools.train.demo import MARK


def test_the_demonstration_trains_and_compares_two_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left_over = tmp_path / "zeropp"  # an earlier demonstration is replaced
    left_over.mkdir()
    (left_over / MARK).touch()
    (left_over / "metrics.jsonl").write_text("old")
    assert main(["demo", "--folder", str(tmp_path), "--steps", "3"]) == 0
    shown = capsys.readouterr().out
    chosen = re.search(r"^chose (\S+) links, on which plain FSDP2 waits for about 70%", shown, re.MULTILINE)
    assert chosen is not None
    place = f"2 nodes x 2 ranks in network namespaces, {chosen[1]} links"
    assert f"training on {place}\n" in shown
    assert re.search(rf"^{place}: plain FSDP2 waited for \d+% of its step$", shown, re.MULTILINE)
    assert re.search(r"^open links, step 0/12, \d:\d\d left$", shown, re.MULTILINE)
    assert re.search(r"^zeropp, step 0/3, \d:\d\d left$", shown, re.MULTILINE)
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()]
    plain, ours = (line for line in lines if line[:1] in (["plain-FSDP2"], ["zeropp"]))
    assert float(ours[6]) < 0.9 < 12 < float(plain[6])  # bytes per parameter
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "zeropp" / "checkpoints" / "step-00000003").is_dir()
    assert f"checkpoint of zeropp: {tmp_path / 'zeropp' / 'checkpoints' / 'step-00000003'}" in shown
    result = (
        r"zeropp: validation loss \d\.\d\d \(plain FSDP2 \d\.\d\d\), 1\d\.\dx fewer bytes between nodes, "
        r"\d+\.\dx the tokens per second\."
    )
    assert re.fullmatch(result, shown.splitlines()[-1])


def test_bad_input_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "0"]) == 1
    assert "steps is 0; expected a positive number" in capsys.readouterr().err
