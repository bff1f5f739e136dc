"""Become a command inside a node of a lab: enter_node.py OWNER_PID NAMESPACE_FD IS_ROOTLESS COMMAND...

Run as a script, in a process of its own: a user namespace can only be entered by a process with one thread.

[Note: Scheduling in a lab]
All ranks of a lab share the cores of one machine. When a message arrives, gloo's thread wakes up, and Linux
lets it interrupt whoever runs on its core. If that is a thread of the same rank, in the middle of sending on
the same connection, it holds the connection's lock, and gloo's thread polls until its time is up. So what
runs on a node is SCHED_BATCH: it has its share of the cores as before, and interrupts nobody.
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
    interrupt_nobody()
    os.execvp(command[0], command)


def interrupt_nobody() -> None:
    """This process, and all that it starts; see [Note: Scheduling in a lab]."""
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except PermissionError as error:  # in a sandbox
        logger.warning("zeropp: SCHED_BATCH is not allowed here (%s), so steps of a lab take longer", error)


if __name__ == "__main__":
    main(*sys.argv[1:])
