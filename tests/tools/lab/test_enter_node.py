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
            assert int(pid) == process.pid  # the command took the place of what started it
            nodes.append(int(namespace))
    assert len({os.stat("/proc/self/ns/net").st_ino, *nodes}) == 3


def test_nobody_interrupts_anybody() -> None:
    see = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"]
    here = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # or it would be inherited
    try:
        with Cluster(nodes=1, ranks_per_node=1) as cluster:
            seen = subprocess.run(cluster.inside(0, see), capture_output=True, text=True, check=True)
    finally:
        os.sched_setscheduler(0, here, os.sched_param(0))
    assert int(seen.stdout) == os.SCHED_BATCH


def test_where_that_is_not_allowed_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with patch.object(os, "sched_setscheduler", side_effect=PermissionError("no")):
        enter_node.interrupt_nobody()
    assert "SCHED_BATCH is not allowed here (no), so steps of a lab take longer" in caplog.text


def test_a_namespace_that_is_not_there_is_named() -> None:
    command = [sys.executable, enter_node.__file__, str(os.getpid()), "999", "0", "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"/proc/{os.getpid()}/fd/999" in done.stderr
