"""Killed labs: processes that end with their owner, and processes that `clean` kills."""

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
from zeropp.tools.lab.processes import find_orphans, is_alive, lab_folder, lab_id

# Prints the pids of the network process and of a job's process, and waits. Handles Ctrl-C even if the tests
# are a background job of a shell, which ignores Ctrl-C.
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
    """Return whether a process has ended. A zombie counts as ended."""
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


def test_clean_kills_the_job_of_a_lab_whose_processes_were_killed_together() -> None:
    with owner() as (process, network_pid, job_pid):
        assert job_pid not in find_orphans()  # its lab is alive
        folder = lab_folder(lab_id(network_pid))
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


def test_lab_ids() -> None:
    mine = lab_id(os.getpid())
    assert is_alive(mine)
    assert not is_alive(f"{os.getpid()}-1")  # the same pid, another process
    assert not is_alive("x")
