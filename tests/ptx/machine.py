"""Runs a kernel: every instruction once, for all threads of some dozens of programs, as NumPy arrays.

[Note: Unwritten values]
A register, or a byte of shared memory, that was never written makes every result unwritten that is computed
from it, in that thread. It is an error where it would show: stored to global memory, in an address, a
predicate or a branch. So lanes that compute with nothing and whose results nobody uses are allowed; Triton
emits such code (a reduction over four warps shuffles 32 lanes, of which four hold a value).

[Note: Threads in step]
All threads of a program execute the same instruction at the same time, and the programs of a batch, too.
Branches must go one way for all of them. A real device keeps threads in step only at barriers: what a program
would need of more, shared memory finds as a race.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import BadAccess, Divergence, PtxError, UnknownInstruction, UnwrittenValue
from .floats import Bits
from .memory import SHARED_START, GlobalMemory, SharedMemory
from .operations import SIGNED, UNSIGNED, Operation, find_operation, pack, unpack
from .parse import Address, Immediate, Instruction, Kernel, Operand, Register, Sink, Special, Symbol

WARP = 32
LANES_AT_ONCE = 8192
MAX_STEPS = 1_000_000
"""Instructions of one batch; more are an endless loop."""

Mask: TypeAlias = NDArray[np.bool_] | None
"""One bool for each lane. As a guard, None means all lanes; of unwritten lanes, none."""


@dataclass(frozen=True)
class Value:
    bits: Bits
    """[lanes], or [1] if all lanes have the same."""
    unwritten: Mask = None


@dataclass(frozen=True)
class Launch:
    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: Sequence[int]
    """Bits of the parameters, in order."""
    memory: GlobalMemory
    shared_bytes: int


def run(launch: Launch) -> None:
    """Execute all programs of a launch."""
    kernel, programs = launch.kernel, int(np.prod(launch.grid))
    if len(launch.arguments) != len(kernel.parameters):
        raise PtxError(f"{len(launch.arguments)} arguments for {len(kernel.parameters)} parameters")
    if kernel.threads % WARP:
        raise PtxError(f"{kernel.threads} threads; expected whole warps of {WARP}")
    steps = [_find_step(instruction.opcode) for instruction in kernel.instructions]
    at_once = max(1, LANES_AT_ONCE // kernel.threads)
    with np.errstate(all="ignore"):
        for first in range(0, programs, at_once):
            _Batch(launch, np.arange(first, min(first + at_once, programs))).run(steps)
        launch.memory.check_races()


Step: TypeAlias = Callable[["_Batch", Instruction, Mask], None]
STEPS: list[tuple[re.Pattern[str], Callable[..., None]]] = []


def step(pattern: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a method of _Batch the one for opcodes of this pattern; groups of the pattern are its arguments."""

    def register(method: Callable[..., None]) -> Callable[..., None]:
        STEPS.append((re.compile(pattern), method))
        return method

    return register


@cache
def _find_step(opcode: str) -> Step:
    if operation := find_operation(opcode):
        found: Operation = operation
        return lambda batch, instruction, guard: batch.compute(found, instruction, guard)
    for pattern, method in STEPS:
        if match := pattern.fullmatch(opcode):
            groups = match.groups()
            return lambda batch, instruction, guard: method(batch, instruction, guard, *groups)
    raise UnknownInstruction(f"{opcode} is not known; see docs/ptx.md")


class _Batch:
    """Some programs of a launch, in step."""

    def __init__(self, launch: Launch, programs: NDArray[np.int64]) -> None:
        self.kernel, self.memory, self.arguments = launch.kernel, launch.memory, launch.arguments
        threads = self.kernel.threads
        self.lanes = len(programs) * threads
        self.thread = (programs[:, None] * threads + np.arange(threads)).ravel()
        self.program = np.repeat(np.arange(len(programs)), threads)
        self.shared = SharedMemory(len(programs), launch.shared_bytes)
        x, y, _ = launch.grid
        everyone = np.repeat(programs, threads)
        self.special = {
            "%tid.x": self.thread % threads,
            "%laneid": self.thread % WARP,
            "%ntid.x": np.array([threads]),
            "%ctaid.x": everyone % x,
            "%ctaid.y": everyone // x % y,
            "%ctaid.z": everyone // (x * y),
        }
        self.registers: dict[str, Value] = {}
        self.next = 0

    def run(self, steps: Sequence[Step]) -> None:
        for _ in range(MAX_STEPS):
            if self.next == len(steps):
                raise PtxError("the kernel ends without ret")
            if self.next < 0:
                return
            instruction, each = self.kernel.instructions[self.next], steps[self.next]
            self.next += 1
            try:
                guard = self._guard(instruction)
                if guard is None or guard.any():
                    each(self, instruction, guard)
            except PtxError as error:
                raise type(error)(f"{error} [{instruction.text}]") from error
        raise PtxError(f"more than {MAX_STEPS} instructions: an endless loop?")

    # Operands.

    def read(self, operand: Operand, bits: int, wider: bool = False) -> Value:
        """The value of an operand of an instruction that works on so many bits."""
        kind = UNSIGNED[bits]
        if isinstance(operand, Register):
            if operand.bits != bits and not (wider and operand.bits > bits):
                raise UnknownInstruction(f"{operand.name} has {operand.bits} bits; expected {bits}")
            value = self.registers.get(operand.name, Value(np.zeros(1, kind), np.ones(1, np.bool_)))
            return value if operand.bits == bits else Value(value.bits.astype(kind), value.unwritten)
        if isinstance(operand, Immediate):
            return Value(np.array([operand.value & (1 << bits) - 1], kind))
        if isinstance(operand, Special):
            return Value(self.special[operand.name].astype(kind))
        if isinstance(operand, Symbol) and operand.name in self.kernel.shared_symbols:
            return Value(np.array([SHARED_START], kind))
        raise UnknownInstruction(f"operand {operand}")

    def write(
        self, operand: Operand, value: Value, guard: Mask, wider: bool = False, signed: bool = False
    ) -> None:
        """Set a register in the lanes of the guard."""
        if isinstance(operand, Sink):
            return
        if not isinstance(operand, Register):
            raise UnknownInstruction(f"destination {operand}")
        bits, unwritten = value.bits, value.unwritten
        width = bits.dtype.itemsize * 8 if bits.dtype != np.bool_ else 1
        if wider and operand.bits > width:
            bits = bits.view(SIGNED[width]) if signed else bits
            bits = bits.astype(SIGNED[operand.bits] if signed else UNSIGNED[operand.bits])
            bits = bits.view(UNSIGNED[operand.bits])
        elif operand.bits != width:
            raise UnknownInstruction(f"{operand.name} has {operand.bits} bits; the result has {width}")
        if guard is not None:
            before = self.read(operand, operand.bits)
            bits = np.where(guard, bits, before.bits)
            unwritten = np.where(guard, _or_none_of(unwritten), _or_none_of(before.unwritten))
        if unwritten is not None and not unwritten.any():
            unwritten = None
        self.registers[operand.name] = Value(bits, unwritten)

    def everywhere(self, array: Bits) -> Bits:
        """[1] or [lanes] to [lanes]."""
        return np.broadcast_to(array, self.lanes)

    def written(self, value: Value, what: str, guard: Mask = None) -> Bits:
        """The bits of a value, in all lanes, if it was written in those of the guard."""
        if value.unwritten is not None:
            wrong = value.unwritten if guard is None else value.unwritten & guard
            if wrong.any():
                lane = int(self.everywhere(wrong).argmax())
                raise UnwrittenValue(f"{what} was never written, in thread {lane % self.kernel.threads}")
        return self.everywhere(value.bits)

    def addresses(self, operand: Operand, guard: Mask, shared: bool) -> NDArray[np.int64]:
        if not isinstance(operand, Address):
            raise UnknownInstruction(f"address {operand}")
        base = self.written(self.read(operand.base, 32 if shared else 64), "an address", guard)
        return base.astype(np.int64) + operand.offset

    def _guard(self, instruction: Instruction) -> Mask:
        if instruction.guard is None:
            return None
        guard = self.written(self.read(instruction.guard, 1), "a predicate")
        guard = ~guard if instruction.guard_negated else guard
        return None if guard.all() else guard

    # Instructions of one thread each.

    def compute(self, operation: Operation, instruction: Instruction, guard: Mask) -> None:
        target, *sources = instruction.operands
        if len(sources) != len(operation.sources):
            raise UnknownInstruction(f"{len(sources)} sources; expected {len(operation.sources)}")
        wider = operation.any_register
        values = [
            self.read(source, bits, wider) for source, bits in zip(sources, operation.sources, strict=True)
        ]
        result = Value(operation.compute(*(value.bits for value in values)), _any_unwritten(values))
        self.write(target, result, guard, wider, operation.signed_result)

    @step(r"selp\.(?:[bsuf])(16|32|64)")
    def _select(self, instruction: Instruction, guard: Mask, width: str) -> None:
        target, first, second, which = instruction.operands
        predicate = self.read(which, 1)
        a, b = self.read(first, int(width)), self.read(second, int(width))
        unwritten = np.where(predicate.bits, _or_none_of(a.unwritten), _or_none_of(b.unwritten))
        if predicate.unwritten is not None:
            unwritten = unwritten | predicate.unwritten
        self.write(target, Value(np.where(predicate.bits, a.bits, b.bits), unwritten), guard)

    @step(r"mov\.(?:[bsuf](16|32|64)|pred)")
    def _move(self, instruction: Instruction, guard: Mask, width: str | None) -> None:
        target, source = instruction.operands
        bits = int(width or 1)
        if isinstance(source, tuple):
            parts = [self.read(part, bits // len(source)) for part in source]
            packed = pack([part.bits for part in parts], bits)
            self.write(target, Value(packed, _any_unwritten(parts)), guard)
        elif isinstance(target, tuple):
            whole = self.read(source, bits)
            for part, value in zip(target, unpack(whole.bits, bits, len(target)), strict=True):
                self.write(part, Value(value, whole.unwritten), guard)
        else:
            self.write(target, self.read(source, bits), guard)

    # Control.

    @step(r"bra(?:\.uni)?")
    def _branch(self, instruction: Instruction, guard: Mask) -> None:
        (target,) = instruction.operands
        if guard is not None:
            raise Divergence("some threads take this branch and some do not")
        if not isinstance(target, Symbol) or target.name not in self.kernel.labels:
            raise UnknownInstruction(f"branch to {target}")
        self.next = self.kernel.labels[target.name]

    @step(r"ret")
    def _return(self, instruction: Instruction, guard: Mask) -> None:
        self._all(guard)
        self.next = -1

    @step(r"bar(?:rier)?\.sync(?:\.aligned)?")
    def _barrier(self, instruction: Instruction, guard: Mask) -> None:
        self._all(guard)
        if instruction.operands != (Immediate(0),):
            raise UnknownInstruction("a barrier of some threads")
        self.shared.barrier()

    @staticmethod
    def _all(guard: Mask) -> None:
        if guard is not None:
            raise Divergence("some threads do not execute this")

    # Memory.

    @step(r"ld\.param\.[busf](8|16|32|64)")
    def _load_parameter(self, instruction: Instruction, guard: Mask, width: str) -> None:
        """The whole parameter, or a part of it: little endian."""
        target, source = instruction.operands
        if not isinstance(source, Address) or not isinstance(source.base, Symbol):
            raise UnknownInstruction(f"parameter {source}")
        name, count = source.base.name, int(width) // 8
        argument = dict(zip(self.kernel.parameters, self.arguments, strict=True))[name]
        if source.offset < 0 or source.offset + count > self.kernel.parameters[name]:
            raise BadAccess(f"{count} bytes at {source.offset} of {self.kernel.parameters[name]}")
        bits = argument >> 8 * source.offset & (1 << int(width)) - 1
        self.write(target, Value(np.array([bits], UNSIGNED[int(width)])), guard)

    @step(r"ld\.(global|shared)(?:\.v(2|4))?\.([busf])(8|16|32|64)")
    def _load(
        self, instruction: Instruction, guard: Mask, space: str, count: str | None, kind: str, width: str
    ) -> None:
        target, source = instruction.operands
        targets = target if isinstance(target, tuple) else (target,)
        if len(targets) != int(count or 1):
            raise UnknownInstruction(f"{len(targets)} destinations of a vector of {count}")
        address = self.addresses(source, guard, shared=space == "shared")
        data, unwritten = self._load_bytes(space, address, len(targets) * int(width) // 8, guard)
        values = np.ascontiguousarray(data).view(UNSIGNED[int(width)])  # [lanes, count]
        missing = unwritten.reshape(self.lanes, len(targets), -1).any(-1)
        for index, each in enumerate(targets):
            value = Value(values[:, index].copy(), missing[:, index])
            self.write(each, value, guard, wider=True, signed=kind == "s")

    @step(r"st\.(global|shared)(?:\.v(2|4))?\.[busf](8|16|32|64)")
    def _store(
        self, instruction: Instruction, guard: Mask, space: str, count: str | None, width: str
    ) -> None:
        target, source = instruction.operands
        sources = source if isinstance(source, tuple) else (source,)
        if len(sources) != int(count or 1):
            raise UnknownInstruction(f"{len(sources)} sources of a vector of {count}")
        values = [self.read(each, int(width), wider=True) for each in sources]
        address = self.addresses(target, guard, shared=space == "shared")
        self._store_values(space, address, values, guard)

    def _load_bytes(
        self, space: str, address: NDArray[np.int64], count: int, guard: Mask
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """[lanes, count] bytes, and which of them were never written. Zeros outside the guard."""
        lanes = slice(None) if guard is None else guard
        data = np.zeros((self.lanes, count), np.uint8)
        unwritten = np.zeros((self.lanes, count), np.bool_)
        thread = self.thread[lanes]
        if space == "global":
            data[lanes] = self.memory.load(address[lanes], count, thread)
        else:
            program = self.program[lanes]
            data[lanes], unwritten[lanes] = self.shared.load(program, address[lanes], count, thread)
        return data, unwritten

    def _store_values(
        self, space: str, address: NDArray[np.int64], values: Sequence[Value], guard: Mask
    ) -> None:
        lanes = slice(None) if guard is None else guard
        data = np.stack([self.everywhere(value.bits) for value in values], axis=1)
        data = data.view(np.uint8)[lanes]
        thread = self.thread[lanes]
        if space == "global":
            for value in values:
                self.written(value, "what is stored to global memory", guard)
            self.memory.store(address[lanes], data, thread)
        else:
            unwritten = [self.everywhere(_or_none_of(value.unwritten)) for value in values]
            flags = np.repeat(np.stack(unwritten, axis=1), data.shape[1] // len(values), axis=1)[lanes]
            self.shared.store(self.program[lanes], address[lanes], data, flags, thread)

    # Instructions of a warp. All of its lanes take part.

    @step(r"shfl\.sync\.(up|down|bfly|idx)\.b32")
    def _shuffle(self, instruction: Instruction, guard: Mask, mode: str) -> None:
        self._all(guard)
        target, source, distance, limits, members = instruction.operands
        self._all_members(members)
        value, by = self.read(source, 32), self.written(self.read(distance, 32), "a distance") & 31
        clamp = self.written(self.read(limits, 32), "a clamp")
        lane = self.special["%laneid"]
        segment = clamp >> np.uint32(8) & np.uint32(31)
        last = (lane & segment) | (clamp & 31 & ~segment)
        first = lane & segment
        partner, inside = {
            "up": (lane - by, lane - by >= last.astype(np.int64)),
            "down": (lane + by, lane + by <= last),
            "bfly": (lane ^ by, lane ^ by <= last),
            "idx": (first | (by & ~segment), first | (by & ~segment) <= last),
        }[mode]
        at = np.arange(self.lanes) - lane + np.where(inside, partner, lane)
        unwritten = None if value.unwritten is None else self.everywhere(value.unwritten)[at]
        self.write(target, Value(self.everywhere(value.bits)[at], unwritten), None)

    @step(r"redux\.sync\.(min|max|and|or|xor|add)\.([su])32")
    def _reduce_warp(self, instruction: Instruction, guard: Mask, name: str, sign: str) -> None:
        self._all(guard)
        target, source, members = instruction.operands
        self._all_members(members)
        value = self.read(source, 32)
        kind = SIGNED[32] if sign == "s" else UNSIGNED[32]
        lanes = self.everywhere(value.bits).view(kind).reshape(-1, WARP)
        function = REDUCTIONS[name]
        total = np.repeat(function.reduce(lanes, axis=1, dtype=kind), WARP).view(np.uint32)
        unwritten = self.everywhere(_or_none_of(value.unwritten)).reshape(-1, WARP).any(1)
        self.write(target, Value(total, np.repeat(unwritten, WARP)), None)

    def _all_members(self, members: Operand) -> None:
        mask = self.written(self.read(members, 32), "a member mask")
        if (mask != 0xFFFFFFFF).any():
            raise Divergence("an instruction of some lanes of a warp")

    @step(r"ldmatrix\.sync\.aligned\.m8n8\.x(1|2|4)(\.trans)?\.shared\.b16")
    def _load_matrices(self, instruction: Instruction, guard: Mask, count: str, transposed: str | None) -> None:
        """A lane gets two neighbors of a row of each matrix, or of a column."""
        self._all(guard)
        target, source = instruction.operands
        targets = target if isinstance(target, tuple) else (target,)
        for each, parts in zip(targets, self._matrices(source, int(count), transposed), strict=True):
            halves = [self._load_bytes("shared", address, 4 // len(parts), None) for address in parts]
            data = np.ascontiguousarray(np.concatenate([data for data, _ in halves], axis=1))
            unwritten = np.concatenate([flags for _, flags in halves], axis=1).any(1)
            self.write(each, Value(data.view(np.uint32)[:, 0].copy(), unwritten), None)

    @step(r"stmatrix\.sync\.aligned\.m8n8\.x(1|2|4)(\.trans)?\.shared\.b16")
    def _store_matrices(self, instruction: Instruction, guard: Mask, count: str, transposed: str | None) -> None:
        self._all(guard)
        target, source = instruction.operands
        sources = source if isinstance(source, tuple) else (source,)
        for each, parts in zip(sources, self._matrices(target, int(count), transposed), strict=True):
            value = self.read(each, 32)
            for address, bits in zip(parts, unpack(value.bits, 32, len(parts)), strict=True):
                self._store_values("shared", address, [Value(bits, value.unwritten)], None)

    def _matrices(
        self, operand: Operand, count: int, transposed: str | None
    ) -> Iterator[list[NDArray[np.int64]]]:
        """For each 8x8 matrix of 16 bits: the addresses of a lane's part, whole or as two halves.

        Lanes 8 i to 8 i + 7 name the rows of matrix i. Lane t has the elements 2 (t % 4) and the next one of
        row t / 4; transposed, of column t / 4."""
        rows = self.addresses(operand, None, shared=True).reshape(-1, WARP)
        if (rows[:, : 8 * count] % 16).any():
            raise BadAccess("a row of a matrix that does not start at a multiple of 16 bytes")
        lane = np.arange(WARP)
        pair, line = 2 * (lane % 4), lane // 4
        for index in range(count):
            if transposed:
                yield [(rows[:, 8 * index + pair + half] + 2 * line).ravel() for half in (0, 1)]
            else:
                yield [(rows[:, 8 * index + line] + 2 * pair).ravel()]


REDUCTIONS: dict[str, np.ufunc] = {
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "add": np.add,
}


def _or_none_of(mask: Mask) -> NDArray[np.bool_]:
    return np.zeros(1, np.bool_) if mask is None else mask


def _any_unwritten(values: Sequence[Value]) -> Mask:
    total: Mask = None
    for value in values:
        if value.unwritten is not None:
            total = value.unwritten if total is None else total | value.unwritten
    return total
