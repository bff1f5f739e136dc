"""The README's example with fewer steps: a GPT on real text, on two simulated nodes of two ranks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from zeropp.tools.lab.job import TORCHRUN

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    out = tmp_path_factory.mktemp("quickstart") / "results.json"
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "4", "-m", "tests.run_script"]
    command += [str(ROOT / "examples/quickstart.py"), "--json", str(out), "--steps", "20"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=600, env=environment, cwd=ROOT)
    runs: dict[str, dict[str, object]] = json.loads(out.read_text())["runs"]
    return runs


def test_validation_loss_is_within_one_percent_of_plain_fsdp2(results: dict[str, dict[str, float]]) -> None:
    plain, ours = results["plain FSDP2"], results["zeropp"]
    assert plain["validation"] < 3.0  # the model has learned: chance is 5.5
    assert ours["validation"] == pytest.approx(plain["validation"], rel=0.01)
    assert ours["validation"] != plain["validation"]


def test_bytes_across_nodes(results: dict[str, dict[str, float]]) -> None:
    """Half of the int8 weights and of the int4 gradients cross nodes, once per step: 0.77 bytes per
    parameter."""
    plain, ours = results["plain FSDP2"], results["zeropp"]
    assert ours["bytes_across_per_node_and_step"] / ours["parameters"] < 0.80
    assert plain["bytes_across_per_node_and_step"] > 17 * ours["bytes_across_per_node_and_step"]
