"""Labs that were killed: what goes by itself, and what `clean` ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeropp.tools.lab import clean
from zeropp.tools.lab.processes import find_left_over, folder_of, is_alive, run_id

# Prints the pids of the network process and of a job's process, and waits. Ctrl-C works in it even if the
# tests are a background job of a shell, which ignores it.
OWNER = """
import signal, subprocess, time
from zeropp.tools.lab import Cluster
signal.signal(signal.SIGINT, signal.default_int_handler)
with Cluster(nodes=2, ranks_per_node=1) as cluster:
    environment = cluster._environment({})
    job = subprocess.Popen(cluster.inside(0, ["sleep", "600"]), env=environment, start_new_session=True)
    print(cluster._network.pid, job.pid, flush=True)
    time.sleep(600)
"""


@contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    network_pid, job_pid = map(int, process.stdout.readline().split())
    wait_until(lambda: Path(f"/proc/{job_pid}/comm").read_text() == "sleep\n")
    try:
        yield process, network_pid, job_pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_until(condition: object, seconds: float = 300.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Ended, or only waiting for a parent to take notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_killed_owner_leaves_nothing() -> None:
    with owner() as (process, network_pid, job_pid):
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: is_gone(network_pid) and is_gone(job_pid))


def test_a_terminated_owner_leaves_nothing() -> None:
    with owner() as (process, network_pid, job_pid):
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_gone(network_pid) and is_gone(job_pid))


def test_an_interrupted_owner_leaves_nothing() -> None:
    with owner() as (process, network_pid, job_pid):
        process.send_signal(signal.SIGINT)
        wait_until(lambda: is_gone(network_pid) and is_gone(job_pid))


def test_clean_ends_what_is_left_when_everything_was_killed_at_once() -> None:
    with owner() as (process, network_pid, job_pid):
        assert job_pid not in find_left_over()  # in use
        folder = folder_of(run_id(network_pid))
        os.kill(network_pid, signal.SIGKILL)
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: is_gone(network_pid))
        assert not is_gone(job_pid)
        assert folder.is_dir()
        assert "sleep 600" in clean()[job_pid]
        wait_until(lambda: is_gone(job_pid))
        assert not folder.exists()
        assert job_pid not in clean()


def test_run_ids() -> None:
    mine = run_id(os.getpid())
    assert is_alive(mine)
    assert not is_alive(f"{os.getpid()}-1")  # the same pid, another process
    assert not is_alive("x")
