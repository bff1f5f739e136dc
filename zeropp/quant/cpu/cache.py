"""Kernels are compiled once per machine, by the process that comes first, and then read from numba's cache.

Without a lock, all ranks of a node would find the cache empty at the same moment, compile the same kernels,
and lose some of each other's: numba's index of a file is read, changed and written by every process that adds
a kernel to it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit

from ..._file_lock import locked

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def kernel(function: Kernel) -> Kernel:
    """Compile at the first call for its types. Never fastmath: the bytes must equal the reference's."""
    dispatcher: Any = njit(nogil=True, cache=True, error_model="numpy")(function)
    compile_or_load = dispatcher.compile

    def compile_one_at_a_time(signature: Any) -> Any:
        with locked(Path(dispatcher.stats.cache_path)):
            return compile_or_load(signature)

    dispatcher.compile = compile_one_at_a_time
    return cast(Kernel, dispatcher)


def inlined(function: Kernel) -> Kernel:
    """Compile as a part of the kernels that call it."""
    return cast(Kernel, njit(nogil=True, error_model="numpy", forceinline=True)(function))
