"""Instructions that compute in each thread by itself: bits in, bits out. The opcode's pattern names a family.

An opcode without a pattern is not known. So is `add.f32` without `.rn`, which ptxas may fuse with a
multiplication, and all that is approximate.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from . import floats
from .floats import Bits

UNSIGNED: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


@dataclass(frozen=True)
class Operation:
    sources: tuple[int, ...]
    """Bits of each source operand."""
    result: int
    """Bits of the result."""
    compute: Callable[..., Bits]
    any_register: bool = False
    """Registers may be wider than the operands: the low bits are read, the result is extended."""
    signed_result: bool = False
    parts: int = 1
    """Independent numbers in each operand and in the result."""
    moved: int = 0
    """The result's bits are copies of bits of the first so many operands; the others say which."""


Family = Callable[[re.Match[str]], Operation]
FAMILIES: list[tuple[re.Pattern[str], Family]] = []


@cache
def find_operation(opcode: str) -> Operation | None:
    """Return the operation of an opcode, or None if it is none of this file."""
    for pattern, family in FAMILIES:
        if match := pattern.fullmatch(opcode):
            return family(match)
    return None


def family(pattern: str) -> Callable[[Family], Family]:
    def register(make: Family) -> Family:
        FAMILIES.append((re.compile(pattern), make))
        return make

    return register


def as_type(bits: Bits, kind: str) -> Bits:
    """The bits as integers of a type such as s32."""
    width = int(kind[1:])
    return bits.view(SIGNED[width] if kind[0] == "s" else UNSIGNED[width])


# Integers.

INTEGER: dict[str, Callable[..., Bits]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


@family(r"(add|sub|mul\.lo|min|max)\.([su](16|32|64))")
def _integer(match: re.Match[str]) -> Operation:
    name, kind, width = match.groups()
    bits = int(width)

    def compute(a: Bits, b: Bits) -> Bits:
        return INTEGER[name](as_type(a, kind), as_type(b, kind)).view(UNSIGNED[bits])

    return Operation((bits, bits), bits, compute)


@family(r"mad\.lo\.[su](32|64)")
def _multiply_add(match: re.Match[str]) -> Operation:
    bits = int(match[1])
    return Operation((bits,) * 3, bits, lambda a, b, c: a * b + c)


@family(r"(mul|mad)\.wide\.([su](16|32))")
def _wide(match: re.Match[str]) -> Operation:
    name, kind, width = match.groups()
    bits = int(width)
    wide = (SIGNED if kind[0] == "s" else UNSIGNED)[2 * bits]

    def product(a: Bits, b: Bits) -> Bits:
        result: Bits = as_type(a, kind).astype(wide) * as_type(b, kind).astype(wide)
        return result.view(UNSIGNED[2 * bits])

    if name == "mul":
        return Operation((bits, bits), 2 * bits, product)
    return Operation((bits, bits, 2 * bits), 2 * bits, lambda a, b, c: product(a, b) + c)


@family(r"(neg|abs)\.s(16|32|64)")
def _integer_sign(match: re.Match[str]) -> Operation:
    bits = int(match[2])
    function = np.negative if match[1] == "neg" else np.abs
    return Operation((bits,), bits, lambda a: function(a.view(SIGNED[bits])).view(UNSIGNED[bits]))


@family(r"setp\.(eq|ne|lt|le|gt|ge)\.([sub](16|32|64))")
def _compare_integers(match: re.Match[str]) -> Operation:
    name, kind, width = match.groups()
    bits = int(width)
    return Operation(
        (bits, bits), 1, lambda a, b: floats.COMPARISONS[name](as_type(a, kind), as_type(b, kind))
    )


# Bits.

LOGIC: dict[str, Callable[..., Bits]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _width(kind: str) -> int:
    return 1 if kind == "pred" else int(kind[1:])


@family(r"(and|or|xor)\.(pred|b16|b32|b64)")
def _logic(match: re.Match[str]) -> Operation:
    bits = _width(match[2])
    return Operation((bits, bits), bits, LOGIC[match[1]])


@family(r"not\.(pred|b16|b32|b64)")
def _not(match: re.Match[str]) -> Operation:
    bits = _width(match[1])
    return Operation((bits,), bits, np.invert)


@family(r"(shl|shr)\.([bsu](16|32|64))")
def _shift(match: re.Match[str]) -> Operation:
    """Shifts by the width or more leave zeros, or signs."""
    name, kind, width = match.groups()
    bits = int(width)

    def compute(a: Bits, amount: Bits) -> Bits:
        x = as_type(a, kind)
        if kind[0] == "s":
            with_sign: Bits = x >> np.minimum(amount, np.uint32(bits - 1)).astype(x.dtype)
            return with_sign.view(UNSIGNED[bits])
        inside = (amount % bits).astype(x.dtype)
        shifted: Bits = x << inside if name == "shl" else x >> inside
        result: Bits = np.where(amount < bits, shifted, np.zeros_like(shifted))
        return result.view(UNSIGNED[bits])

    return Operation((bits, 32), bits, compute)


@family(r"shf\.(l|r)\.(wrap|clamp)\.b32")
def _funnel_shift(match: re.Match[str]) -> Operation:
    left, wrap = match[1] == "l", match[2] == "wrap"

    def compute(low: Bits, high: Bits, amount: Bits) -> Bits:
        both = high.astype(np.uint64) << np.uint64(32) | low
        by = (amount % 32 if wrap else np.minimum(amount, np.uint32(32))).astype(np.uint64)
        shifted = both << by >> np.uint64(32) if left else both >> by
        return shifted.astype(np.uint32)

    return Operation((32, 32, 32), 32, compute)


@family(r"bfe\.(s|u)(32|64)")
def _extract_field(match: re.Match[str]) -> Operation:
    signed, width = match[1] == "s", int(match[2])
    kind = UNSIGNED[width]

    def compute(a: Bits, start: Bits, length: Bits) -> Bits:
        """Bits from `start` on, and above them zeros or the sign: the last bit of the field, or of a."""
        first, count = (start & 0xFF).astype(np.int64), (length & 0xFF).astype(np.int64)
        inside = np.minimum(np.maximum(width - first, np.int64(0)), count)
        mask = np.where(inside < width, (kind(1) << (inside % width).astype(kind)) - kind(1), ~kind(0))
        field: Bits = a >> np.minimum(first, np.int64(width - 1)).astype(kind) & mask
        if not signed:
            return field
        last = np.minimum(np.maximum(first + count, np.int64(1)), np.int64(width)) - 1
        negative = (a >> last.astype(kind) & kind(1) != 0) & (count > 0)
        extended: Bits = np.where(negative, field | ~mask, field)
        return extended

    return Operation((width, 32, 32), width, compute)


@family(r"prmt\.b32")
def _permute_bytes(match: re.Match[str]) -> Operation:
    """Each of four selectors names one of eight bytes, or (bit 3) its sign in all bits."""

    def compute(a: Bits, b: Bits, selectors: Bits) -> Bits:
        both = b.astype(np.uint64) << np.uint64(32) | a
        result = np.zeros(np.broadcast_shapes(both.shape, selectors.shape), np.uint32)
        for position in range(4):
            selector = selectors.astype(np.uint64) >> np.uint64(4 * position)
            byte = (both >> (selector & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)).astype(np.uint32)
            signs = np.where(byte & np.uint32(0x80) != 0, np.uint32(0xFF), np.uint32(0))
            byte = np.where(selector & np.uint64(8) != 0, signs, byte)
            result |= byte << np.uint32(8 * position)
        return result

    return Operation((32, 32, 32), 32, compute, moved=2)


@family(r"lop3\.b32")
def _three_input_logic(match: re.Match[str]) -> Operation:
    """Bit i of the table is the result for inputs with bits 4 a + 2 b + c = i."""

    def compute(a: Bits, b: Bits, c: Bits, table: Bits) -> Bits:
        result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
        for index in range(8):
            inputs = [x if index >> shift & 1 else ~x for x, shift in ((a, 2), (b, 1), (c, 0))]
            chosen = np.where(table >> np.uint32(index) & np.uint32(1) != 0, ~np.uint32(0), np.uint32(0))
            result |= inputs[0] & inputs[1] & inputs[2] & chosen
        return result

    return Operation((32, 32, 32, 32), 32, compute)


# Floats.


@family(r"(add|sub|mul|div)\.rn(\.ftz)?\.f32")
def _float(match: re.Match[str]) -> Operation:
    return Operation((32, 32), 32, partial(_flushed if match[2] else floats.arithmetic, match[1]))


def _flushed(name: str, a: Bits, b: Bits) -> Bits:
    return floats.flush(floats.arithmetic(name, floats.flush(a), floats.flush(b)))


@family(r"(add|sub|mul)\.rn\.f32x2")
def _float_pair(match: re.Match[str]) -> Operation:
    """Two independent fp32 numbers in 64 bits."""

    def compute(a: Bits, b: Bits) -> Bits:
        pairs = [np.ascontiguousarray(x).view(np.uint32).reshape(-1, 2) for x in (a, b)]
        return np.ascontiguousarray(floats.arithmetic(match[1], *pairs)).view(np.uint64).reshape(-1)

    return Operation((64, 64), 64, compute, parts=2)


@family(r"(add|sub)\.rn\.f32\.(f16|bf16)")
def _mixed(match: re.Match[str]) -> Operation:
    """The first operand is widened, which is exact; then it is the instruction of fp32."""
    widen = floats.from_fp16 if match[2] == "f16" else floats.from_bf16
    return Operation((16, 32), 32, lambda a, c: floats.arithmetic(match[1], widen(a), c))


@family(r"(min|max)(\.NaN)?\.f32")
def _float_extreme(match: re.Match[str]) -> Operation:
    return Operation((32, 32), 32, partial(floats.smaller_or_larger, match[1], bool(match[2])))


@family(r"(neg|abs)\.f32")
def _float_sign(match: re.Match[str]) -> Operation:
    return Operation(
        (32,), 32, (lambda a: a ^ floats.SIGN) if match[1] == "neg" else lambda a: a & floats.MAGNITUDE
    )


@family(r"setp\.((?:eq|ne|lt|le|gt|ge)u?|num|nan)\.f32")
def _compare_floats(match: re.Match[str]) -> Operation:
    return Operation((32, 32), 1, partial(floats.compare, match[1]))


# Conversions.


@family(r"cvt\.([su](8|16|32|64))\.([su](8|16|32|64))")
def _convert_integer(match: re.Match[str]) -> Operation:
    target, target_bits, source, source_bits = match.groups()
    wide = SIGNED[64] if source[0] == "s" else UNSIGNED[64]

    def compute(a: Bits) -> Bits:
        return as_type(a, source).astype(wide).astype(UNSIGNED[int(target_bits)])

    return Operation(
        (int(source_bits),), int(target_bits), compute, any_register=True, signed_result=target[0] == "s"
    )


@family(r"cvt\.rn\.f32\.([su])32")
def _integer_to_float(match: re.Match[str]) -> Operation:
    return Operation((32,), 32, lambda a: as_type(a, match[1] + "32").astype(np.float32).view(np.uint32))


@family(r"cvt\.f32\.(f16|bf16)")
def _widen(match: re.Match[str]) -> Operation:
    return Operation((16,), 32, floats.from_fp16 if match[1] == "f16" else floats.from_bf16)


NARROW = {
    ("f16", "rn"): floats.to_fp16,
    ("bf16", "rn"): floats.to_bf16,
    ("bf16", "rz"): floats.cut_to_bf16,
}


@family(r"cvt\.(rn)\.(f16|bf16)\.f32|cvt\.(rz)\.(bf16)\.f32")
def _narrow(match: re.Match[str]) -> Operation:
    rounding, kind = filter(None, match.groups())
    return Operation((32,), 16, NARROW[kind, rounding])


@family(r"cvt\.(rn)\.(f16|bf16)x2\.f32|cvt\.(rz)\.(bf16)x2\.f32")
def _narrow_pair(match: re.Match[str]) -> Operation:
    """The first operand becomes the upper half."""
    rounding, kind = filter(None, match.groups())
    narrow = NARROW[kind, rounding]

    def compute(high: Bits, low: Bits) -> Bits:
        return pack([narrow(low), narrow(high)], 32)

    return Operation((32, 32), 32, compute)


# Packing: mov between a register and a tuple of narrower ones.


def pack(parts: list[Bits], bits: int) -> Bits:
    """Parts from the lowest to the highest."""
    each = bits // len(parts)
    kind = UNSIGNED[bits]
    total = parts[0].astype(kind)
    for index, part in enumerate(parts[1:], 1):
        total = total | part.astype(kind) << kind(each * index)
    return total


def unpack(whole: Bits, bits: int, count: int) -> list[Bits]:
    each = bits // count
    shifts = (UNSIGNED[bits](each * index) for index in range(count))
    return [(whole >> shift).astype(UNSIGNED[each]) for shift in shifts]
