"""Memory of a launch: the bytes of its tensors, and each program's shared memory. Every access is checked."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .errors import BadAccessError, RaceError

Index = NDArray[np.int64]
Bytes = NDArray[np.uint8]

SHARED_START = 0x400
"""Address of the first shared byte: not 0, so that a zero is no address."""
NOBODY, SEVERAL = -1, -2
"""Of the thread that touched a byte."""


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

    def holds(self, offset: Index, count: int) -> NDArray[np.bool_]:
        """Whether `count` bytes from each offset belong to the tensor: not to a gap between its rows."""
        inside = offset >= 0
        for stride, size in self.dims:
            index = np.minimum(offset // stride, size - 1)
            offset = offset - index * stride
        return inside & (offset + count <= self.run)

    def memory(self) -> Bytes:
        buffer = (ctypes.c_uint8 * self.extent).from_address(self.start)
        return np.frombuffer(buffer, np.uint8)


class GlobalMemory:
    """The tensors of a launch, at their addresses. Threads have numbers that are unique in the launch."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        regions = {Region.of(tensor) for tensor in tensors if tensor.numel()}
        self._regions = [(region, region.memory()) for region in regions]
        self._reads: list[tuple[Index, Index]] = []
        self._writes: list[tuple[Index, Index]] = []

    def load(self, address: Index, count: int, thread: Index) -> Bytes:
        """[n, count] bytes."""
        data = np.zeros((len(address), count), np.uint8)
        for chosen, offset, memory in self._find(address, count):
            data[chosen] = memory[each_byte(offset, count)]
        self._remember(self._reads, address, count, thread)
        return data

    def store(self, address: Index, data: Bytes, thread: Index) -> None:
        for chosen, offset, memory in self._find(address, data.shape[1]):
            memory[each_byte(offset, data.shape[1])] = data[chosen]
        self._remember(self._writes, address, data.shape[1], thread)

    def check_races(self) -> None:
        """No byte that one thread writes is touched by another one: no barrier orders programs."""
        if not self._writes:
            return
        address, thread = _together(self._writes)
        order = np.argsort(address, kind="stable")
        address, thread = address[order], thread[order]
        twice = (address[1:] == address[:-1]) & (thread[1:] != thread[:-1])
        if twice.any():
            raise RaceError(f"two threads write the global byte at {address[1:][twice][0]:#x}")
        if self._reads:
            read, reader = _together(self._reads)
            at = np.minimum(np.searchsorted(address, read), len(address) - 1)
            other = (address[at] == read) & (thread[at] != reader)
            if other.any():
                raise RaceError(
                    f"a thread reads the global byte at {read[other][0]:#x}, another one writes it"
                )

    def _find(self, address: Index, count: int) -> list[tuple[NDArray[np.bool_], Index, Bytes]]:
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

    @staticmethod
    def _remember(log: list[tuple[Index, Index]], address: Index, count: int, thread: Index) -> None:
        log.append((each_byte(address, count).ravel(), np.repeat(thread, count)))


def _together(log: list[tuple[Index, Index]]) -> tuple[Index, Index]:
    address, thread = zip(*log, strict=True)
    return np.concatenate(address), np.concatenate(thread)


def check_alignment(space: str, address: Index, count: int) -> None:
    wrong = address % count != 0
    if wrong.any():
        raise BadAccessError(
            f"{count} bytes of {space} memory at {address[wrong][0]:#x}, no multiple of {count}"
        )


class SharedMemory:
    """Shared memory of several programs: bytes, which of them were written, and who touched them since the
    last barrier. Threads have numbers that are unique in the launch.

    Threads may store the same value to one byte in one instruction: Triton's layouts repeat small tensors."""

    def __init__(self, programs: int, size: int) -> None:
        self.size = size
        self._data = np.zeros(programs * size, np.uint8)
        self._unwritten = np.ones(programs * size, np.bool_)
        self._writer = np.full(programs * size, NOBODY)
        self._reader = np.full(programs * size, NOBODY)

    def barrier(self) -> None:
        self._writer.fill(NOBODY)
        self._reader.fill(NOBODY)

    def load(self, program: Index, address: Index, count: int, thread: Index) -> tuple[Bytes, Bytes]:
        """[n, count] bytes, and which of them were never written."""
        at, by = self._positions(program, address, count), thread[:, None]
        self._check_race(at, self._writer[at], by, "reads", "wrote")
        before = self._reader[at]
        self._reader[at] = by
        several = (self._reader[at] != by) | (before != NOBODY) & (before != by)
        self._reader[at[several]] = SEVERAL
        return self._data[at], self._unwritten[at]

    def store(self, program: Index, address: Index, data: Bytes, unwritten: Bytes, thread: Index) -> None:
        at, by = self._positions(program, address, data.shape[1]), thread[:, None]
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
        return each_byte(program * self.size + offset, count)

    def _check_race(self, at: Index, other: Index, by: Index, now: str, before: str) -> None:
        raced = (other != NOBODY) & (other != by)
        if raced.any():
            raise RaceError(
                f"a thread {now} shared byte {at[raced][0] % self.size}, another one {before} it, and no "
                "barrier is between them"
            )
