"""Ranks under their watcher processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, time
from zeropp.tools.cli.watcher import watch_rank
code = watch_rank()
if code is not None:
    sys.exit(code)
exec(sys.argv[1])
"""


def watched(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` as a rank under its watcher."""
    command = [sys.executable, "-c", PROGRAM, code]
    return subprocess.run(
        command, env=os.environ | {"RANK": "3"}, capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_ends_with_its_own_code(code: int) -> None:
    done = watched(f"print('done'); sys.exit({code})")
    assert (done.returncode, done.stdout, done.stderr) == (code, "done\n", "")


def test_a_signal_is_reported_with_advice() -> None:
    done = watched("os.kill(os.getpid(), 4)")
    assert done.returncode == 128 + 4
    assert "Fatal Python error: Illegal instruction" in done.stderr
    assert "rank 3 was ended by SIGILL (illegal instruction). Try: set ONEDNN_MAX_CPU_ISA" in done.stderr


def test_a_launcher_that_stops_the_watcher_stops_the_rank(tmp_path: Path) -> None:
    """SIGTERM goes on to the rank. SIGKILL of the watcher kills the rank, too."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        read, write = os.pipe()  # the rank holds the write end while it lives
        code = "print('up', flush=True); time.sleep(600)"
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, code],
            env=os.environ | {"RANK": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[write],
        )
        os.close(write)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(number)
        assert process.wait(timeout=600) == (128 + number if number == signal.SIGTERM else -number)
        process.stdout.close()
        assert os.read(read, 1) == b""  # the rank is gone, too
        os.close(read)
