"""Error messages of commands: one paragraph for an error that the user can fix, a traceback for any other.

[Note: One rank reports]
Under torchrun most errors occur on all ranks, and one rank prints them. Before the process group exists, the
first rank of each node prints, because a file can be missing on one node only. Afterwards `World` elects the
rank: the first one, or another if the first has no error.
"""

from __future__ import annotations

import os
import sys
import traceback

from rich.console import Console

from ..lab import JobError, LabError

USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError, LabError, JobError)
"""Errors of commands for invalid input, files that cannot be read or written, packages that are not
installed, and runs that diverge. Their messages contain the cause and the fix."""


def print_error(error: Exception) -> None:
    """Print the error of a command to standard error, on one rank. [Note: One rank reports]"""
    if not _prints_errors():
        return
    if isinstance(error, USER_ERRORS):
        _print(f"error: {_message(error)}")
    else:
        traceback.print_exception(error)


def print_interrupted() -> None:
    if is_first_of_node():
        _print("interrupted")


def is_first_of_node() -> bool:
    """Return whether this is the first rank of its node, or a process without torchrun."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _prints_errors() -> bool:
    distributed = sys.modules.get("torch.distributed")  # an import would take seconds
    if distributed is None or not distributed.is_initialized():
        return is_first_of_node()
    from ..train.world import World

    return World.current().claim_error_report()


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror is not None and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _print(text: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="red", markup=False)
