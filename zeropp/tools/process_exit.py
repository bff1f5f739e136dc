"""How a process ended, in words, and what to try where the cause is known."""

from __future__ import annotations

import signal

from .amx import CAP, CAP_VARIABLE

SIGNALS: dict[int, tuple[str, str]] = {
    signal.SIGILL: (
        "illegal instruction",
        f"set {CAP_VARIABLE}={CAP}: some CPUs announce AMX and cannot run it",
    ),
    signal.SIGKILL: (
        "killed",
        "look for 'out of memory' in the kernel's log (dmesg); use fewer ranks or a smaller batch",
    ),
    signal.SIGBUS: ("bus error", "look whether /dev/shm is full (df /dev/shm)"),
    signal.SIGSEGV: ("segmentation fault", ""),
    signal.SIGABRT: ("aborted", ""),
    signal.SIGTERM: ("terminated", ""),
}
"""By signal: its meaning, and what to try."""


def describe_exit(code: int | None) -> str:
    """
    >>> describe_exit(1), describe_exit(-4), describe_exit(None)
    ('ended with exit code 1', 'was ended by SIGILL (illegal instruction)', 'was stopped')
    """
    if code is None:
        return "was stopped"
    if code >= 0:
        return f"ended with exit code {code}"
    name, (meaning, _) = signal.Signals(-code).name, SIGNALS.get(-code, ("", ""))
    return f"was ended by {name} ({meaning})" if meaning else f"was ended by {name}"


def advise_on_exit(code: int | None) -> str:
    """What to try about this exit code; empty where nothing is known.

    >>> advise_on_exit(-7)
    'look whether /dev/shm is full (df /dev/shm)'
    """
    return SIGNALS.get(-code, ("", ""))[1] if code is not None else ""
