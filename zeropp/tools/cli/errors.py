"""Errors as a user sees them: what can be mended by the user is one paragraph, the rest is a traceback.

[Note: Who speaks]
Under torchrun most errors happen on all ranks alike, and one rank is to say so. Before ranks know each other
it is the first one of each node: a file may be missing on one node only. From then on
`World.claim_error_report` decides: the first rank, or another one whose error the first does not have.
"""

from __future__ import annotations

import os
import sys
import traceback

from rich.console import Console

from ..lab import JobError, LabError

OF_USERS = (ValueError, OSError, ImportError, FloatingPointError, LabError, JobError)
"""What commands raise for bad input, files that cannot be read or written, packages that are not installed,
and runs that diverge. Their messages say what is wrong and what to do."""


def tell(error: Exception) -> None:
    """Say on standard error why a command has failed, on one rank. [Note: Who speaks]"""
    if not _is_to_tell():
        return
    if isinstance(error, OF_USERS):
        _print(f"error: {_text(error)}")
    else:
        traceback.print_exception(error)


def tell_interrupted() -> None:
    if is_first_of_node():
        _print("interrupted")


def is_first_of_node() -> bool:
    """Also of a process that torchrun did not start."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _is_to_tell() -> bool:
    distributed = sys.modules.get("torch.distributed")  # not imported for this alone: it takes seconds
    if distributed is None or not distributed.is_initialized():
        return is_first_of_node()
    from ..train.world import World

    return World.current().claim_error_report()


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror is not None and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _print(text: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="red", markup=False)
