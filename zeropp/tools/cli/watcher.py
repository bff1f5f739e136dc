"""A watcher process for each rank of a command. If a signal ends the rank, the watcher reports the signal.

A process that a signal ends cannot report it, and the other ranks only see closed connections. So the command
forks before it imports torch: the child runs the rank, and the parent waits for it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal

from rich.console import Console

from ..process_exit import advise_on_exit, describe_exit

STOPPED_BY_OTHERS = (signal.SIGTERM, signal.SIGINT)
"""Signals with which launchers and users stop a rank. They are not reported."""
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def watch_rank() -> int | None:
    """Fork. The child gets None and runs the rank. The parent waits for the child and returns its exit code.

    Call this while the process has a single thread.
    """
    watcher = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPED_BY_OTHERS)  # until the watcher handles them
    rank = os.fork()
    if rank == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the rank dies if the watcher is killed
        if os.getppid() != watcher:  # the watcher was killed before the line above
            os._exit(1)
        faulthandler.enable()
        return None
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(rank, number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to the rank, too
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    if code >= 0:
        return code
    if -code not in STOPPED_BY_OTHERS:
        advice = advise_on_exit(code)
        text = f"rank {os.environ['RANK']} {describe_exit(code)}" + (f". Try: {advice}" if advice else "")
        Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="red", markup=False)
    return 128 - code
