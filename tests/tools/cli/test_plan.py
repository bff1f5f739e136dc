"""`zeropp plan`, from the command line to its files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zeropp.tools.cli import main
from zeropp.tools.plan.catalog import find_hardware

SMALL = ["plan", "--model", "tiny", "--nodes", "2", "--ranks-per-node", "2", "--sequence", "64"]
SHALLOW = [*SMALL, "--model", "tests.tools.plan.samples:build_shallow"]


def test_it_prints_a_plan_and_writes_numbers_report_and_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / name for name in ("plan.json", "plan.html", "trace.json")}
    arguments = ["--json", str(files["plan.json"]), "--html", str(files["plan.html"])]
    assert main([*SMALL, *arguments, "--trace", str(files["trace.json"]), "--link-gbit-s", "5"]) == 0
    output = capsys.readouterr()
    shown = output.out
    assert output.err.splitlines() == [
        "dry run: zeropp's default, 2 nodes x 2 ranks",
        "dry run: FSDP2 as it comes, 2 nodes x 2 ranks",
    ]
    assert "zeropp's default" in shown
    assert "2 nodes x 2 ranks" in shown
    numbers = json.loads(files["plan.json"].read_text())
    option, plain = numbers["options"]
    assert (option["strategy"], plain["strategy"]) == ("default", "fsdp2")
    assert option["across_bytes"] > 0
    assert option["step_seconds"] > 0
    assert numbers["hardware"]["link_gbit_s"] == 5.0
    assert files["plan.html"].read_text().startswith("<!doctype html>")
    events = json.loads(files["trace.json"].read_text())["traceEvents"]
    assert any(event["name"].startswith("forward") for event in events)


def test_recommend_and_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main([*SHALLOW, "--link-gbit-s", "1", "--recommend", "--json", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    numbers = json.loads(path.read_text())
    rows = {option["strategy"]: option["step_seconds"] for option in numbers["options"]}
    theirs, ours = (
        ("fsdp2", "fsdp2-reshard", "hsdp", "hfsdp"),
        ("qwz", "hpz", "qgz", "paper", "default", "four-bit"),
    )
    assert set(rows) == {*theirs, *ours}
    fastest = numbers["options"][0]
    assert fastest["step_seconds"] == min(rows.values())
    assert f"Use {fastest['title']}" in shown
    why, until, larger, script, estimates = numbers["sentences"]
    assert all(f"- {sentence}" in shown for sentence in (why, until, larger, script, estimates))
    assert "zpp = zeropp.apply(model, zeropp.Config" in script
    assert "are estimates" in estimates
    assert "FSDP2 as it comes" in until
    assert main([*SHALLOW, "--sweep", "link=1/100,nodes=2/3"]) == 0
    assert "tokens/s, 3 nodes" in capsys.readouterr().out


def test_a_hardware_file_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    find_hardware("a100-pcie-25gbe").save(path)
    assert main([*SMALL, "--hardware", str(path), "--strategy", "fsdp2"]) == 0
    assert "a100-pcie-25gbe" in capsys.readouterr().out


def test_a_missing_link_rate_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one_node.json"
    replace(find_hardware("a100-100g"), link_gbit_s=None, link_latency_us=None).save(path)
    arguments = [*SMALL, "--hardware", str(path), "--strategy", "fsdp2"]
    assert main(arguments) == 1
    assert "link_latency_us of hardware 'a100-100g' is not known" in capsys.readouterr().err
    assert main([*arguments, "--link-gbit-s", "100", "--link-latency-us", "10"]) == 0
    assert main([*arguments, "--nodes", "1"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "a100"], "hardware is 'a100'; expected one of v100-dgx2-100g"),
        (["--strategy", "zero4"], "strategy is 'zero4'; expected one of fsdp2"),
        (["--model", "7B"], "model is '7B'"),
        (["--sweep", "speed=3"], "sweep is 'speed=3'"),
        (["--nodes", "0"], "nodes is 0"),
        (["--compute-share", "2"], "compute_share is 2.0"),
        (["--json", "nowhere/plan.json"], "nowhere/plan.json cannot be written"),
    ],
)
def test_bad_input_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 1
    assert message in capsys.readouterr().err
