"""Kernels are compiled once per machine, by the process that comes first, and then read from numba's cache.

Without more, all ranks of a node would find the cache empty at the same moment, compile the same kernels, and
forget some of each other's: numba's index of a file is read, changed and written by whoever adds to it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def kernel(function: Kernel) -> Kernel:
    """Compiled at the first call for its types. Never fastmath: the bytes must equal the reference's."""
    dispatcher: Any = njit(nogil=True, cache=True, error_model="numpy")(function)
    compile_or_load = dispatcher.compile

    def compile_one_at_a_time(signature: Any) -> Any:
        with _locked(Path(dispatcher.stats.cache_path)):
            return compile_or_load(signature)

    dispatcher.compile = compile_one_at_a_time
    return cast(Kernel, dispatcher)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """No other process, or thread, compiles for this folder. Where files cannot be locked, any number do."""
    with ExitStack() as stack:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / "zeropp.lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, be it by a crash
        yield
