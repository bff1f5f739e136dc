"""Descriptions of exit codes, with advice for known causes."""

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
    signal.SIGBUS: ("bus error", "check whether /dev/shm is full (df /dev/shm)"),
    signal.SIGSEGV: ("segmentation fault", ""),
    signal.SIGABRT: ("aborted", ""),
    signal.SIGTERM: ("terminated", ""),
}
"""Meaning and advice of each signal."""


def describe_exit(code: int | None) -> str:
    """Describe an exit code of `subprocess`. None stands for a process that the caller has stopped.

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
    """Return advice for an exit code, or an empty string.

    >>> advise_on_exit(-7)
    'check whether /dev/shm is full (df /dev/shm)'
    """
    return SIGNALS.get(-code, ("", ""))[1] if code is not None else ""
