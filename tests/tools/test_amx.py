"""CPUs that announce AMX and die of it. A stand-in for the trial runs on any machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import Ranks
from zeropp.tools import amx
from zeropp.tools.amx import CAP, CAP_VARIABLE, cap_onednn, make_bf16_safe

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
DIES_UNCAPPED = f"import os; {CAP_VARIABLE!r} in os.environ or exec({DIES!r})"


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A CPU that announces AMX, in a process whose oneDNN is not capped."""
    monkeypatch.setattr(amx, "announces_amx", lambda: True)
    monkeypatch.delenv(CAP_VARIABLE, raising=False)
    return monkeypatch


def count_trials(folder: Path, code: str) -> tuple[str, ...]:
    """Return a trial that appends a letter to a file and then runs `code`."""
    return (sys.executable, "-c", f"open({str(folder / 'count')!r}, 'a').write('x'); {code}")


@pytest.mark.usefixtures("announced")
def test_a_trial_that_dies_caps_onednn_once_per_boot(tmp_path: Path) -> None:
    trial = count_trials(tmp_path, DIES_UNCAPPED)
    is_safe, why = make_bf16_safe(trial, tmp_path)
    assert is_safe
    assert os.environ[CAP_VARIABLE] == CAP
    assert "(SIGILL): the CPU announces AMX and cannot run it" in why
    assert f"{CAP_VARIABLE}={CAP} is set for this process" in why
    del os.environ[CAP_VARIABLE]
    assert make_bf16_safe(trial, tmp_path) == (True, why)
    assert (tmp_path / "count").read_text() == "xx"  # without the cap, and with it


@pytest.mark.usefixtures("announced")
def test_a_trial_that_lives_changes_nothing(tmp_path: Path) -> None:
    assert make_bf16_safe(amx.TRIAL, tmp_path) == (True, "")
    assert CAP_VARIABLE not in os.environ
    broken = (sys.executable, "-c", "raise SystemExit(3)")  # not caused by the CPU
    assert make_bf16_safe(broken, tmp_path / "other") == (True, "")


def test_the_users_value_stays(announced: pytest.MonkeyPatch, tmp_path: Path) -> None:
    announced.setenv(CAP_VARIABLE, "AVX512_CORE_AMX")
    cap_onednn()
    assert os.environ[CAP_VARIABLE] == "AVX512_CORE_AMX"
    is_safe, why = make_bf16_safe((sys.executable, "-c", DIES), tmp_path)
    assert not is_safe
    assert f"{CAP_VARIABLE} is 'AVX512_CORE_AMX', expected {CAP} or lower" in why


@pytest.mark.usefixtures("announced")
def test_a_cpu_that_dies_with_the_cap_too(tmp_path: Path) -> None:
    is_safe, why = make_bf16_safe((sys.executable, "-c", DIES), tmp_path)
    assert not is_safe
    assert "compute in fp32" in why


def test_without_amx_there_is_no_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(amx, "announces_amx", lambda: False)
    assert make_bf16_safe((sys.executable, "-c", DIES), tmp_path) == (True, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("announced")
def test_a_read_only_home_costs_a_trial_each_time(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    trial = count_trials(tmp_path, "")
    for _ in range(2):
        assert make_bf16_safe(trial, file / "no folder") == (True, "")
    assert (tmp_path / "count").read_text() == "xx"


PROGRAM = """
import os, sys, torch
os.environ["ONEDNN_MAX_CPU_ISA"] = sys.argv[1]
torch.nn.functional.conv2d(torch.ones(8, 16, 32, 32), torch.ones(16, 16, 3, 3))
"""


def test_onednn_reads_the_cap_at_its_first_product_and_not_before() -> None:
    """With its log on, oneDNN prints its instruction set at its first use."""
    environment = {name: value for name, value in os.environ.items() if name != CAP_VARIABLE}
    environment["ONEDNN_VERBOSE"] = "1"
    seen = {}
    for cap in ("SSE41", CAP):
        command = [sys.executable, "-c", PROGRAM, cap]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=600
        )
        seen[cap] = next(line for line in done.stdout.splitlines() if "cpu,isa:" in line)
    assert "SSE4.1" in seen["SSE41"]
    assert "AMX" not in seen[CAP]


def cap_of_a_rank() -> str | None:
    return os.environ.get(CAP_VARIABLE)


def test_tests_run_with_the_cap(ranks: Ranks) -> None:
    assert ranks.run(cap_of_a_rank, world=2) == [os.environ[CAP_VARIABLE]] * 2
