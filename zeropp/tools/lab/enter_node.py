"""Script that runs a command in a node: enter_node.py OWNER_PID NAMESPACE_FD IS_ROOTLESS COMMAND...

It is a separate process, because only a process with one thread can enter a user namespace. The process then
becomes the command.

[Note: Scheduling in a lab]
All ranks of a lab share the cores of one machine. When a message arrives, gloo's thread wakes up, and Linux
lets it preempt the thread on its core. That thread may belong to the same rank and be sending on the same
connection. It then holds the connection's lock, and gloo's thread polls until its time slice ends. Processes
of a node therefore have the policy SCHED_BATCH: the same share of the cores, and no preemption by wake-ups.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys

logger = logging.getLogger("zeropp")


def main(owner_pid: str, namespace_fd: str, is_rootless: str, *command: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces = [f"/proc/{owner_pid}/ns/user"] if is_rootless == "1" else []
    namespaces.append(f"/proc/{owner_pid}/fd/{namespace_fd}")
    for path, fd in [(path, os.open(path, os.O_RDONLY)) for path in namespaces]:
        if libc.setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")
    use_batch_scheduling()
    os.execvp(command[0], command)


def use_batch_scheduling() -> None:
    """Set SCHED_BATCH for this process and its children. See [Note: Scheduling in a lab]."""
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except PermissionError as error:  # in a sandbox
        logger.warning("zeropp: SCHED_BATCH is not allowed here (%s), so lab steps take longer", error)


if __name__ == "__main__":
    main(*sys.argv[1:])
