"""Memory of a launch: the bytes of its tensors, and each program's shared memory. Every access is checked."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .errors import BadAccessError, RaceError

Index: TypeAlias = NDArray[Any]  # int64
Bytes: TypeAlias = NDArray[Any]  # uint8
Flags: TypeAlias = NDArray[Any]  # bool

SHARED_START = 0x400
"""Address of the first shared byte: not 0, so that a zero is no address."""
NOBODY, SEVERAL = -1, -2
"""Number of the thread that touched a byte."""


def each_byte(start: Index, count: int) -> Index:
    """[n] to [n, count]: the positions of `count` bytes from each start."""
    return start[:, None] + np.arange(count)


@dataclass(frozen=True)
class Region:
    """The bytes of one tensor: runs of contiguous bytes, at nested strides."""

    start: int
    run: int
    dims: tuple[tuple[int, int], ...]
    """(stride in bytes, size), from the largest stride to the smallest."""

    @classmethod
    def of(cls, tensor: Tensor) -> Region:
        """The region of a tensor; an expanded dimension counts once."""
        size_of = tensor.element_size()
        strides = sorted(
            (stride * size_of, size)
            for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
            if size > 1 and stride > 0
        )
        run = size_of if tensor.numel() else 0
        while strides and strides[0][0] == run:
            run *= strides.pop(0)[1]
        return cls(tensor.data_ptr(), run, tuple(reversed(strides)))

    @property
    def extent(self) -> int:
        return sum(stride * (size - 1) for stride, size in self.dims) + self.run

    def holds(self, offset: Index, count: int) -> Flags:
        """Whether `count` bytes from each offset belong to the tensor: not to a gap between its rows."""
        inside = offset >= 0
        for stride, size in self.dims:
            index = np.minimum(offset // stride, np.int64(size - 1))
            offset = offset - index * stride
        return inside & (offset + count <= self.run)

    def memory(self) -> Bytes:
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.extent).from_address(self.start))


@dataclass(frozen=True)
class Threads:
    """Who executes an access: numbers that are unique in the launch, and how many barriers came before."""

    number: Index
    program: Index
    barriers: int


@dataclass(frozen=True)
class Log:
    """Accesses to single bytes."""

    address: Index
    number: Index
    program: Index
    barriers: Index

    @classmethod
    def of(cls, address: Index, count: int, threads: Threads) -> Log:
        number, program = (np.repeat(each, count) for each in (threads.number, threads.program))
        barriers = np.full(len(number), threads.barriers)
        return cls(each_byte(address, count).ravel(), number, program, barriers)

    @classmethod
    def together(cls, logs: list[Log]) -> Log:
        """Those of all logs, in the order of their addresses."""
        columns = [np.concatenate(column) for column in zip(*(log.columns for log in logs), strict=True)]
        order = np.argsort(columns[0], kind="stable")
        return cls(*(column[order] for column in columns))

    @property
    def columns(self) -> tuple[Index, Index, Index, Index]:
        return self.address, self.number, self.program, self.barriers

    def __getitem__(self, at: Index | slice) -> Log:
        return Log(*(column[at] for column in self.columns))

    def races_with(self, other: Log) -> Flags:
        """Pairwise: two threads at one address, with no barrier of one program between them."""
        ordered = (self.program == other.program) & (self.barriers != other.barriers)
        raced: Flags = (self.address == other.address) & (self.number != other.number) & ~ordered
        return raced


class GlobalMemory:
    """The tensors of a launch, at their addresses."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        regions = {Region.of(tensor) for tensor in tensors if tensor.numel()}
        self._regions = [(region, region.memory()) for region in regions]
        self._reads: list[Log] = []
        self._writes: list[Log] = []

    def load(self, address: Index, count: int, threads: Threads) -> Bytes:
        """[n, count] bytes."""
        data = np.zeros((len(address), count), np.uint8)
        for chosen, offset, memory in self._find(address, count):
            data[chosen] = memory[each_byte(offset, count)]
        self._reads.append(Log.of(address, count, threads))
        return data

    def store(self, address: Index, data: Bytes, threads: Threads) -> None:
        for chosen, offset, memory in self._find(address, data.shape[1]):
            memory[each_byte(offset, data.shape[1])] = data[chosen]
        self._writes.append(Log.of(address, data.shape[1], threads))

    def check_races(self) -> None:
        """No byte that a thread writes is touched by another one, unless a barrier orders them.

        Each write of a byte is compared with the next one. That is exact for a byte that is written once."""
        if not self._writes:
            return
        writes = Log.together(self._writes)
        twice = writes[1:].races_with(writes[:-1])
        if twice.any():
            raise RaceError(f"two threads write the global byte at {writes.address[1:][twice][0]:#x}")
        if self._reads:
            reads = Log.together(self._reads)
            last = np.int64(len(writes.address) - 1)
            at = np.minimum(np.searchsorted(writes.address, reads.address), last)
            raced = reads.races_with(writes[at])
            if raced.any():
                where = f"{reads.address[raced][0]:#x}"
                raise RaceError(f"a thread reads the global byte at {where}, another one writes it")

    def _find(self, address: Index, count: int) -> list[tuple[Flags, Index, Bytes]]:
        """For each region: the accesses to it, and where in its memory they are."""
        check_alignment("global", address, count)
        found, missing = [], np.ones(len(address), np.bool_)
        for region, memory in self._regions:
            chosen = region.holds(address - region.start, count)
            if chosen.any():
                found.append((chosen, address[chosen] - region.start, memory))
                missing &= ~chosen
        if missing.any():
            raise BadAccessError(
                f"{count} bytes at {address[missing][0]:#x} are not all in one tensor of the launch"
            )
        return found


def check_alignment(space: str, address: Index, count: int) -> None:
    wrong = address % count != 0
    if wrong.any():
        raise BadAccessError(
            f"{count} bytes of {space} memory at {address[wrong][0]:#x}, no multiple of {count}"
        )


class SharedMemory:
    """Shared memory of several programs: bytes, which of them were written, and who touched them since the
    last barrier.

    Threads may store the same value to one byte in one instruction: Triton's layouts repeat small tensors."""

    def __init__(self, programs: Index, size: int) -> None:
        self.size, self._first = size, int(programs[0])
        total = len(programs) * size
        self._data = np.zeros(total, np.uint8)
        self._unwritten = np.ones(total, np.bool_)
        self._writer = np.full(total, NOBODY)
        self._reader = np.full(total, NOBODY)

    def barrier(self) -> None:
        self._writer.fill(NOBODY)
        self._reader.fill(NOBODY)

    def load(self, address: Index, count: int, threads: Threads) -> tuple[Bytes, Flags]:
        """[n, count] bytes, and which of them were never written."""
        at, by = self._positions(threads.program, address, count), threads.number[:, None]
        self._check_race(at, self._writer[at], by, "reads", "wrote")
        before = self._reader[at]
        self._reader[at] = by
        several = (self._reader[at] != by) | (before != NOBODY) & (before != by)
        self._reader[at[several]] = SEVERAL
        return self._data[at], self._unwritten[at]

    def store(self, address: Index, data: Bytes, unwritten: Flags, threads: Threads) -> None:
        at, by = self._positions(threads.program, address, data.shape[1]), threads.number[:, None]
        self._check_race(at, self._writer[at], by, "writes", "wrote")
        self._check_race(at, self._reader[at], by, "writes", "read")
        self._writer[at] = by
        self._data[at], self._unwritten[at] = data, unwritten
        together = self._writer[at] != by
        if (together & (self._data[at] != data)).any():
            raise RaceError("two threads store different values at one shared byte, in one instruction")
        self._writer[at[together]] = SEVERAL

    def _positions(self, program: Index, address: Index, count: int) -> Index:
        check_alignment("shared", address, count)
        offset = address - SHARED_START
        outside = (offset < 0) | (offset + count > self.size)
        if outside.any():
            raise BadAccessError(f"{count} shared bytes at {offset[outside][0]} of {self.size}")
        return each_byte((program - self._first) * self.size + offset, count)

    def _check_race(self, at: Index, other: Index, by: Index, now: str, before: str) -> None:
        raced = (other != NOBODY) & (other != by)
        if raced.any():
            raise RaceError(
                f"a thread {now} shared byte {at[raced][0] % self.size}, another one {before} it, and no "
                "barrier is between them"
            )
