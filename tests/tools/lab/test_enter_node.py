from __future__ import annotations

import os
import subprocess
import sys
from unittest.mock import patch

import pytest

from zeropp.tools.lab import Cluster, enter_node


def test_a_command_becomes_part_of_its_node() -> None:
    with Cluster(nodes=2, ranks_per_node=1) as cluster:
        see = [sys.executable, "-c", "import os; print(os.getpid(), os.stat('/proc/self/ns/net').st_ino)"]
        nodes = []
        for node in (0, 1):
            process = subprocess.Popen(cluster.inside(node, see), stdout=subprocess.PIPE, text=True)
            pid, namespace = process.communicate()[0].split()
            assert int(pid) == process.pid  # the script has become the command
            nodes.append(int(namespace))
    assert len({os.stat("/proc/self/ns/net").st_ino, *nodes}) == 3


def test_processes_of_a_node_are_sched_batch() -> None:
    see = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"]
    here = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # otherwise the process inherits SCHED_BATCH
    try:
        with Cluster(nodes=1, ranks_per_node=1) as cluster:
            seen = subprocess.run(cluster.inside(0, see), capture_output=True, text=True, check=True)
    finally:
        os.sched_setscheduler(0, here, os.sched_param(0))
    assert int(seen.stdout) == os.SCHED_BATCH


def test_a_warning_follows_where_that_is_not_allowed(caplog: pytest.LogCaptureFixture) -> None:
    with patch.object(os, "sched_setscheduler", side_effect=PermissionError("no")):
        enter_node.use_batch_scheduling()
    assert "SCHED_BATCH is not allowed here (no), so lab steps take longer" in caplog.text


def test_a_missing_namespace_is_named() -> None:
    command = [sys.executable, enter_node.__file__, str(os.getpid()), "999", "0", "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"/proc/{os.getpid()}/fd/999" in done.stderr
