"""A lock between processes: a file in a folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`: one process or thread at a time. Creates the folder if it is missing.

    The kernel releases the lock when its holder ends, even by a crash. Where files cannot be locked (a
    read-only home), the block runs without a lock.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / "zeropp.lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
