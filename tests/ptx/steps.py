"""Instructions that do more than compute in each thread: moves, control, memory, and those of whole warps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from .errors import BadAccessError, DivergenceError, UnknownInstructionError
from .memory import Index
from .operations import SIGNED, UNSIGNED, find_operation, pack, unpack
from .parse import Address, Immediate, Instruction, Operand, Symbol
from .values import Mask, Value, all_or_no_bits

if TYPE_CHECKING:
    from .machine import Batch

WARP = 32

Step: TypeAlias = Callable[["Batch", Instruction, Mask], None]
STEPS: list[tuple[re.Pattern[str], Callable[..., None]]] = []


def step(pattern: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function for the opcodes of this pattern. Its last arguments are the pattern's groups."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        STEPS.append((re.compile(pattern), function))
        return function

    return register


@cache
def find_step(opcode: str) -> Step:
    """Return the function that executes an opcode, given the batch, the instruction and its guard."""
    operation = find_operation(opcode)
    if operation is not None:
        return lambda batch, instruction, guard: batch.compute(operation, instruction, guard)
    for pattern, function in STEPS:
        if match := pattern.fullmatch(opcode):
            groups = match.groups()
            return lambda batch, instruction, guard: function(batch, instruction, guard, *groups)
    raise UnknownInstructionError(f"{opcode} is not known; see docs/ptx.md")


# Moves.


@step(r"selp\.(?:[bsuf])(16|32|64)")
def _select(batch: Batch, instruction: Instruction, guard: Mask, width: str) -> None:
    target, first, second, which = instruction.operands
    predicate = batch.read(which, 1)
    a, b = batch.read(first, int(width)), batch.read(second, int(width))
    unwritten = np.where(predicate.bits, a.missing, b.missing)
    unwritten = np.where(predicate.missing, ~np.zeros_like(unwritten), unwritten)
    batch.write(target, Value(np.where(predicate.bits, a.bits, b.bits), unwritten), guard)


@step(r"mov\.(?:[bsuf](16|32|64)|pred)")
def _move(batch: Batch, instruction: Instruction, guard: Mask, width: str | None) -> None:
    target, source = instruction.operands
    bits = int(width or 1)
    if isinstance(source, tuple):
        parts = [batch.read(part, bits // len(source)) for part in source]
        packed = pack([part.bits for part in parts], bits)
        batch.write(target, Value(packed, pack([part.missing for part in parts], bits)), guard)
    elif isinstance(target, tuple):
        whole = batch.read(source, bits)
        values, unwritten = (unpack(each, bits, len(target)) for each in (whole.bits, whole.missing))
        for part, value, missing in zip(target, values, unwritten, strict=True):
            batch.write(part, Value(value, missing), guard)
    else:
        batch.write(target, batch.read(source, bits), guard)


# Control.


@step(r"bra(?:\.uni)?")
def _branch(batch: Batch, instruction: Instruction, guard: Mask) -> None:
    (target,) = instruction.operands
    if guard is not None:
        raise DivergenceError("some threads take this branch and some do not")
    if not isinstance(target, Symbol) or target.name not in batch.kernel.labels:
        raise UnknownInstructionError(f"branch to {target}")
    batch.next = batch.kernel.labels[target.name]


@step(r"ret")
def _return(batch: Batch, instruction: Instruction, guard: Mask) -> None:
    _all(guard)
    batch.next = -1


@step(r"bar(?:rier)?\.sync(?:\.aligned)?")
def _barrier(batch: Batch, instruction: Instruction, guard: Mask) -> None:
    _all(guard)
    if instruction.operands != (Immediate(0),):
        raise UnknownInstructionError("a barrier of some threads")
    batch.barrier()


def _all(guard: Mask) -> None:
    if guard is not None:
        raise DivergenceError("some threads do not execute this")


# Memory.


@step(r"ld\.param\.[busf](8|16|32|64)")
def _load_parameter(batch: Batch, instruction: Instruction, guard: Mask, width: str) -> None:
    """The whole parameter, or a part of it: little endian."""
    target, source = instruction.operands
    if not isinstance(source, Address) or not isinstance(source.base, Symbol):
        raise UnknownInstructionError(f"parameter {source}")
    name, count = source.base.name, int(width) // 8
    argument = dict(zip(batch.kernel.parameters, batch.arguments, strict=True))[name]
    if source.offset < 0 or source.offset + count > batch.kernel.parameters[name]:
        raise BadAccessError(f"{count} bytes at {source.offset} of {batch.kernel.parameters[name]}")
    bits = argument >> 8 * source.offset & (1 << int(width)) - 1
    batch.write(target, Value(np.array([bits], UNSIGNED[int(width)])), guard)


@step(r"ld\.(global|shared)(?:\.v(2|4))?\.([busf])(8|16|32|64)")
def _load(
    batch: Batch, instruction: Instruction, guard: Mask, space: str, count: str | None, kind: str, width: str
) -> None:
    target, source = instruction.operands
    targets = target if isinstance(target, tuple) else (target,)
    if len(targets) != int(count or 1):
        raise UnknownInstructionError(f"{len(targets)} destinations of a vector of {count}")
    address = batch.addresses(source, guard, shared=space == "shared")
    values = batch.load(space, address, len(targets), int(width), guard)  # [lanes, count]
    for index, each in enumerate(targets):
        value = Value(values.bits[:, index], values.missing[:, index])
        batch.write(each, value, guard, wider=True, signed=kind == "s")


@step(r"st\.(global|shared)(?:\.v(2|4))?\.[busf](8|16|32|64)")
def _store(
    batch: Batch, instruction: Instruction, guard: Mask, space: str, count: str | None, width: str
) -> None:
    target, source = instruction.operands
    sources = source if isinstance(source, tuple) else (source,)
    if len(sources) != int(count or 1):
        raise UnknownInstructionError(f"{len(sources)} sources of a vector of {count}")
    values = [batch.read(each, int(width), wider=True) for each in sources]
    address = batch.addresses(target, guard, shared=space == "shared")
    batch.store(space, address, values, guard)


# Instructions of a warp. All of its lanes take part.


@step(r"shfl\.sync\.(up|down|bfly|idx)\.b32")
def _shuffle(batch: Batch, instruction: Instruction, guard: Mask, mode: str) -> None:
    _all(guard)
    target, source, distance, limits, members = instruction.operands
    _all_members(batch, members)
    value, by = batch.read(source, 32), batch.written(batch.read(distance, 32), "a distance") & 31
    clamp = batch.written(batch.read(limits, 32), "a clamp")
    lane = batch.special["%laneid"]
    segment = clamp >> np.uint32(8) & np.uint32(31)
    last = (lane & segment) | (clamp & 31 & ~segment)
    first = lane & segment
    partner, inside = {
        "up": (lane - by, lane - by >= last.astype(np.int64)),
        "down": (lane + by, lane + by <= last),
        "bfly": (lane ^ by, lane ^ by <= last),
        "idx": (first | (by & ~segment), first | (by & ~segment) <= last),
    }[mode]
    at = np.arange(batch.lanes) - lane + np.where(inside, partner, lane)
    bits, unwritten = (batch.everywhere(each)[at] for each in (value.bits, value.missing))
    batch.write(target, Value(bits, unwritten), None)


@step(r"redux\.sync\.(min|max|and|or|xor|add)\.([su])32")
def _reduce_warp(batch: Batch, instruction: Instruction, guard: Mask, name: str, sign: str) -> None:
    _all(guard)
    target, source, members = instruction.operands
    _all_members(batch, members)
    value = batch.read(source, 32)
    kind = SIGNED[32] if sign == "s" else UNSIGNED[32]
    lanes = batch.everywhere(value.bits).view(kind).reshape(-1, WARP)
    function = REDUCTIONS[name]
    total = np.repeat(function.reduce(lanes, axis=1, dtype=kind), WARP).view(np.uint32)
    missing = np.bitwise_or.reduce(batch.everywhere(value.missing).reshape(-1, WARP), axis=1)
    batch.write(target, Value(total, np.repeat(all_or_no_bits(missing != 0, UNSIGNED[32]), WARP)), None)


def _all_members(batch: Batch, members: Operand) -> None:
    mask = batch.written(batch.read(members, 32), "a member mask")
    if (mask != 0xFFFFFFFF).any():
        raise DivergenceError("an instruction of some lanes of a warp")


@step(r"ldmatrix\.sync\.aligned\.m8n8\.x(1|2|4)(\.trans)?\.shared\.b16")
def _load_matrices(
    batch: Batch, instruction: Instruction, guard: Mask, count: str, transposed: str | None
) -> None:
    """A lane gets two neighbors of a row of each matrix, or of a column."""
    _all(guard)
    target, source = instruction.operands
    targets = target if isinstance(target, tuple) else (target,)
    for each, parts in zip(targets, _matrices(batch, source, int(count), transposed), strict=True):
        values = [batch.load("shared", address, 1, 32 // len(parts), None) for address in parts]
        bits = pack([value.bits[:, 0] for value in values], 32)
        batch.write(each, Value(bits, pack([value.missing[:, 0] for value in values], 32)), None)


@step(r"stmatrix\.sync\.aligned\.m8n8\.x(1|2|4)(\.trans)?\.shared\.b16")
def _store_matrices(
    batch: Batch, instruction: Instruction, guard: Mask, count: str, transposed: str | None
) -> None:
    _all(guard)
    target, source = instruction.operands
    sources = source if isinstance(source, tuple) else (source,)
    for each, parts in zip(sources, _matrices(batch, target, int(count), transposed), strict=True):
        value = batch.read(each, 32)
        values, unwritten = (unpack(part, 32, len(parts)) for part in (value.bits, value.missing))
        for address, bits, missing in zip(parts, values, unwritten, strict=True):
            batch.store("shared", address, [Value(bits, missing)], None)


def _matrices(batch: Batch, operand: Operand, count: int, transposed: str | None) -> Iterator[list[Index]]:
    """For each 8x8 matrix of 16 bits: the addresses of a lane's part, whole or as two halves.

    Lanes 8 i to 8 i + 7 name the rows of matrix i. Lane t has the elements 2 (t % 4) and the next one of
    row t / 4; transposed, of column t / 4."""
    rows = batch.addresses(operand, None, shared=True).reshape(-1, WARP)
    if (rows[:, : 8 * count] % 16).any():
        raise BadAccessError("a row of a matrix that does not start at a multiple of 16 bytes")
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
