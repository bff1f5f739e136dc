"""Runs a kernel: every instruction once, for all threads of some dozens of programs, as NumPy arrays.

[Note: Threads in step]
All threads of a program execute the same instruction at the same time, and the programs of a batch, too.
Branches must go one way for all of them. A real device keeps threads in step only at barriers: what a program
would need of more, shared memory finds as a race.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import PtxError, UnknownInstructionError, UnwrittenValueError
from .floats import Bits
from .memory import SHARED_START, GlobalMemory, Index, SharedMemory, Threads
from .operations import UNSIGNED, Operation
from .parse import Address, Immediate, Instruction, Kernel, Operand, Register, Sink, Special, Symbol
from .steps import WARP, Step, find_step
from .values import Mask, Value, extended, never_written, unwritten_results

LANES_AT_ONCE = 8192
MAX_STEPS = 1_000_000
"""Instructions of one batch; more are an endless loop."""


@dataclass(frozen=True)
class Launch:
    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: Sequence[int]
    """Bits of the parameters, in order."""
    memory: GlobalMemory
    shared_bytes: int


def run(launch: Launch, only_last: int | None = None) -> None:
    """Execute all programs of a launch, or a number of its last ones."""
    kernel, programs = launch.kernel, int(np.prod(launch.grid))
    if len(launch.arguments) != len(kernel.parameters):
        raise PtxError(f"{len(launch.arguments)} arguments for {len(kernel.parameters)} parameters")
    if kernel.threads % WARP:
        raise PtxError(f"{kernel.threads} threads; expected whole warps of {WARP}")
    steps = [find_step(instruction.opcode) for instruction in kernel.instructions]
    at_once = max(1, LANES_AT_ONCE // kernel.threads)
    with np.errstate(all="ignore"):
        for first in range(0 if only_last is None else programs - only_last, programs, at_once):
            Batch(launch, np.arange(first, min(first + at_once, programs))).run(steps)
        launch.memory.check_races()


class Batch:
    """Some programs of a launch, in step."""

    def __init__(self, launch: Launch, programs: Index) -> None:
        self.kernel, self.memory, self.arguments = launch.kernel, launch.memory, launch.arguments
        threads = self.kernel.threads
        self.lanes = len(programs) * threads
        self.thread = (programs[:, None] * threads + np.arange(threads)).ravel()
        self.program = np.repeat(programs, threads)
        self.shared = SharedMemory(programs, launch.shared_bytes)
        x, y, _ = launch.grid
        self.special = {
            "%tid.x": self.thread % threads,
            "%laneid": self.thread % WARP,
            "%ntid.x": np.array([threads]),
            "%ctaid.x": self.program % x,
            "%ctaid.y": self.program // x % y,
            "%ctaid.z": self.program // (x * y),
        }
        self.registers: dict[str, Value] = {}
        self.next = 0
        self.barriers = 0

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
                raise UnknownInstructionError(f"{operand.name} has {operand.bits} bits; expected {bits}")
            value = self.registers.get(operand.name) or never_written(operand.bits)
            return (
                value if operand.bits == bits else Value(value.bits.astype(kind), value.missing.astype(kind))
            )
        if isinstance(operand, Immediate):
            return Value(np.array([operand.value & (1 << bits) - 1], kind))
        if isinstance(operand, Special):
            return Value(self.special[operand.name].astype(kind))
        if isinstance(operand, Symbol) and operand.name in self.kernel.shared_symbols:
            return Value(np.array([SHARED_START], kind))
        raise UnknownInstructionError(f"operand {operand}")

    def write(
        self, operand: Operand, value: Value, guard: Mask, wider: bool = False, signed: bool = False
    ) -> None:
        """Set a register in the lanes of the guard."""
        if isinstance(operand, Sink):
            return
        if not isinstance(operand, Register):
            raise UnknownInstructionError(f"destination {operand}")
        bits, unwritten = value.bits, value.unwritten
        width = bits.dtype.itemsize * 8 if bits.dtype != np.bool_ else 1
        if wider and operand.bits > width:
            bits = extended(bits, width, operand.bits, signed)
            unwritten = None if unwritten is None else extended(unwritten, width, operand.bits, True)
        elif operand.bits != width:
            raise UnknownInstructionError(f"{operand.name} has {operand.bits} bits; the result has {width}")
        if guard is not None:
            before = self.read(operand, operand.bits)
            bits = np.where(guard, bits, before.bits)
            unwritten = np.where(guard, value.missing, before.missing) if width == operand.bits else unwritten
        if unwritten is not None and not unwritten.any():
            unwritten = None
        self.registers[operand.name] = Value(bits, unwritten)

    def everywhere(self, array: Bits) -> Bits:
        """[1] or [lanes] to [lanes]."""
        return np.broadcast_to(array, self.lanes)

    def written(self, value: Value, what: str, guard: Mask = None) -> Bits:
        """The bits of a value, in all lanes, if it was written in those of the guard."""
        if value.unwritten is not None:
            wrong = value.unwritten != 0 if guard is None else (value.unwritten != 0) & guard
            if wrong.any():
                lane = int(self.everywhere(wrong).argmax())
                raise UnwrittenValueError(f"{what} was never written, in thread {lane % self.kernel.threads}")
        return self.everywhere(value.bits)

    def addresses(self, operand: Operand, guard: Mask, shared: bool) -> Index:
        if not isinstance(operand, Address):
            raise UnknownInstructionError(f"address {operand}")
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
            raise UnknownInstructionError(f"{len(sources)} sources; expected {len(operation.sources)}")
        wider = operation.any_register
        values = [
            self.read(source, bits, wider) for source, bits in zip(sources, operation.sources, strict=True)
        ]
        bits = operation.compute(*(value.bits for value in values))
        unwritten = unwritten_results(operation, values)
        self.write(target, Value(bits, unwritten), guard, wider, operation.signed_result)

    # Memory.

    def load(self, space: str, address: Index, count: int, width: int, guard: Mask) -> Value:
        """[lanes, count] numbers of `width` bits; zeros outside the guard."""
        lanes = self._executing(guard)
        data, unwritten = np.zeros((2, self.lanes, count * width // 8), np.uint8)
        threads, at = self._threads(lanes), address[lanes]
        if space == "global":
            data[lanes] = self.memory.load(at, data.shape[1], threads)
        else:
            data[lanes], flags = self.shared.load(at, data.shape[1], threads)
            unwritten[lanes] = np.where(flags, np.uint8(0xFF), np.uint8(0))
        return Value(data.view(UNSIGNED[width]), unwritten.view(UNSIGNED[width]))

    def store(self, space: str, address: Index, values: Sequence[Value], guard: Mask) -> None:
        lanes = self._executing(guard)
        data, threads = self._as_bytes([value.bits for value in values])[lanes], self._threads(lanes)
        if space == "global":
            for value in values:
                self.written(value, "a value stored to global memory", guard)
            self.memory.store(address[lanes], data, threads)
        else:
            unwritten = self._as_bytes([value.missing for value in values])[lanes] != 0
            self.shared.store(address[lanes], data, unwritten, threads)

    def barrier(self) -> None:
        self.barriers += 1
        self.shared.barrier()

    def _executing(self, guard: Mask) -> Index:
        return np.arange(self.lanes) if guard is None else np.flatnonzero(guard)

    def _threads(self, lanes: Index) -> Threads:
        return Threads(self.thread[lanes], self.program[lanes], self.barriers)

    def _as_bytes(self, arrays: Sequence[Bits]) -> NDArray[np.uint8]:
        """[lanes, bytes of all arrays]."""
        return np.stack([self.everywhere(array) for array in arrays], axis=1).view(np.uint8)
