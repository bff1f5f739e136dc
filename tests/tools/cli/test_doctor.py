"""`zeropp doctor`, in one process and under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from zeropp.tools.cli import main
from zeropp.tools.lab.job import TORCHRUN

ROOT = Path(__file__).parents[3]
PATIENT = ("--timeout-seconds", "300")
"""A long timeout, for busy machines."""


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "zeropp", "doctor", *PATIENT, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_good_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two parts run, to save time; tests/tools/doctor tests all. The planner accepts the hardware file."""
    small = ["--sequence", "8", "--micro-batch", "1", "--rounds", "1", "--width", "64"]
    files = ["--json", "doctor.json", "--html", "doctor.html"]
    done = torchrun(tmp_path, "--node-size", "1", "--parts", "surroundings", "speed", *small, *files)
    assert done.returncode == 0, done.stderr
    assert "surroundings ..." in done.stdout
    assert "no faults: 6 ok, 1 warning" in done.stdout
    assert done.stdout.count("zeropp doctor: 2 ranks, cpu") == 1
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert [result["state"] for result in found["results"]] == ["ok", "ok", "ok", "warning", "ok", "ok", "ok"]
    assert found["advice"][0] in " ".join(done.stdout.split())
    assert (tmp_path / "doctor.html").read_text().startswith("<!doctype html>")
    hardware = ["--hardware", str(tmp_path / "hardware.json"), "--strategy", "fsdp2"]
    model = ["--model", "tests.tools.plan.samples:build_shallow", "--nodes", "2", "--sequence", "64"]
    assert main(["plan", *model, *hardware]) == 0
    assert "on measured" in " ".join(capsys.readouterr().out.split())


def test_a_fault_is_the_exit_code(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--node-size", "3", "--parts", "surroundings", "collectives")
    assert done.returncode == 1
    assert "checks found a fault: surroundings: nodes" in done.stdout
    assert "zeropp/tools/doctor" not in done.stdout + done.stderr  # no traceback but torchrun's
    assert not (tmp_path / "hardware.json").exists()


def test_one_process_without_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json", "doctor.json"]) == 0
    assert "start it with torchrun on all nodes" in " ".join(capsys.readouterr().out.split())
    found = json.loads((tmp_path / "doctor.json").read_text())
    states = {(result["part"], result["state"]) for result in found["results"]}
    assert states - {("kernels", "warning")} == {
        ("surroundings", "ok"),
        ("kernels", "ok"),
        ("collectives", "not run"),
        ("training", "not run"),
        ("speed", "not run"),
    }
    assert found["hardware"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "nowhere/doctor.json"], "nowhere/doctor.json cannot be written"),
        (["--node-size", "0"], "node_size is 0; expected a positive number"),
    ],
)
def test_bad_input_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 1
    assert message in capsys.readouterr().err
