"""The scripts in examples/ under torchrun, with few steps. tests/test_quickstart.py has the first one."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from zeropp.tools.lab.job import TORCHRUN

ROOT = Path(__file__).parents[1]


def run_example(name: str, *arguments: str) -> str:
    """Run a script on four ranks and return its output."""
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "4", "-m", "tests.run_script"]
    command += [str(ROOT / "examples" / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=600, check=True
    ).stdout


def test_the_frozen_base_of_lora_crosses_nodes_once() -> None:
    shown = run_example("lora.py", "--steps", "3")
    sizes = re.search(r"([\d,]+) parameters, ([\d,]+) of them in adapters", shown)
    assert sizes is not None
    base, adapters = (int(size.replace(",", "")) for size in sizes.groups())
    rows = re.findall(r"^ +\d+ +[\d.]+ +([\d,]+) +([\d,]+)$", shown, re.MULTILINE)
    sent = [int(ours.replace(",", "")) for ours, _ in rows]
    fsdp2 = [int(theirs.replace(",", "")) for _, theirs in rows]
    assert len(sent) == 3
    assert sent[0] > 0.5 * base  # half of the int8 weights
    assert sent[1] == sent[2] < 0.85 * adapters
    assert fsdp2[2] > 50 * sent[2]


def test_a_run_with_history_resumes_bit_for_bit(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shown = run_example("resume.py", "--steps", "6", "--folder", str(folder))
    assert "the losses are equal bit for bit, on every rank" in shown
    assert len(list(folder.glob("zeropp-*.pt"))) == 4


def test_hsdp_and_zeropp_send_fewer_bytes_than_fsdp2_at_the_same_loss() -> None:
    shown = run_example("compare_hsdp.py", "--steps", "3")
    rows = re.findall(r"^(FSDP2|HSDP|zeropp) +([\d.]+) +([\d,]+) +([\d,]+) ", shown, re.MULTILINE)
    loss = {name: float(value) for name, value, _, _ in rows}
    sent = {name: int(value.replace(",", "")) for name, _, value, _ in rows}
    memory = {name: int(value.replace(",", "")) for name, _, _, value in rows}
    assert max(loss.values()) - min(loss.values()) < 0.01 * loss["FSDP2"]
    assert sent["FSDP2"] > 5 * sent["HSDP"] > 20 * sent["zeropp"]
    assert memory["HSDP"] > 1.9 * memory["FSDP2"]
