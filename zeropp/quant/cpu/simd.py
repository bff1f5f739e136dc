"""Sixteen numbers at a time, as one value of numba's: what the inner loops of blocks.py are written in.

LLVM's own vectorizer gives every type of a loop the same number of lanes, as many as the widest one has in a
register: with AVX2 it packs codes by eights, and rounds, clamps and shifts bytes as 32-bit integers. Here the
lanes are fixed, LLVM cuts them into the registers that the CPU has, and each step is done in its own type.
"""

from __future__ import annotations

from typing import Any

from numba import config, types
from numba.core.codegen import get_host_cpu_features
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import register_model

# isort: split
from llvmlite import ir  # type: ignore[import-untyped]

from ..noise import MULTIPLIERS, SHIFTS
from .intrinsics import LANES, instruction, load_lanes, multiply_add, round_lanes, store_lanes

_I8, _I16, _I32, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_BYTES, _SHORTS, _INTS, _FLOATS = (ir.VectorType(each, LANES) for each in (_I8, _I16, _I32, _FLOAT))

# Adding 1.5 * 2^23 rounds a small float to an integer, to nearest even, and leaves it in the low bits.
_ROUNDER = 1.5 * 2**23
_ROUNDER_BITS = 0x4B400000


# Whether the CPU looks up bytes in a register: any x86-64 since 2006.
_FORCED: str | None = getattr(config, "CPU_FEATURES", None)
_HOST: str = get_host_cpu_features()  # type: ignore[no-untyped-call]
HAS_LOOKUP = "+ssse3" in (_HOST if _FORCED is None else _FORCED).split(",")


class Lanes(types.Type):
    """LANES numbers in fp32."""


lanes = Lanes("lanes")


@register_model(Lanes)
class _LanesModel(PrimitiveModel):
    def __init__(self, manager: Any, lanes_type: Lanes) -> None:
        super().__init__(manager, lanes_type, _FLOATS)  # type: ignore[no-untyped-call]


@instruction
def load(typing_context: Any, place: Any) -> Any:
    """Numbers of elements of any type; see [Note: Elements] in intrinsics.py."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load_lanes(builder, args[0], place.dtype)

    return lanes(place), generate


@instruction
def store(typing_context: Any, values: Any, place: Any) -> Any:
    """Rounded to elements of any type."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store_lanes(builder, args[0], args[1], place.dtype)
        return context.get_dummy_value()

    return types.void(lanes, place), generate


@instruction
def plus(typing_context: Any, a: Any, b: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args)

    return lanes(lanes, lanes), generate


@instruction
def times(typing_context: Any, a: Any, b: Any) -> Any:
    """All of them times the same number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(args[0], _broadcast(builder, args[1], _FLOATS))

    return lanes(lanes, types.float32), generate


@instruction
def times_plus(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, fused or not: only where products are exact."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return multiply_add(builder, args[0], _broadcast(builder, args[1], _FLOATS), args[2])

    return lanes(lanes, types.float32, lanes), generate


@instruction
def from_codes(typing_context: Any, codes: Any) -> Any:
    """Numbers of codes of int8."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(builder.sext(_load_bytes(builder, args[0]), _INTS), _FLOATS)

    return lanes(codes), generate


@instruction
def from_nibbles(typing_context: Any, codes: Any, high: Any) -> Any:
    """Numbers of codes of int4, in the upper or in the lower half of each byte."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        packed = builder.zext(_load_bytes(builder, args[0]), _INTS)
        if high.literal_value:
            nibbles = builder.lshr(packed, _INTS([4] * LANES))
        else:
            nibbles = builder.and_(packed, _INTS([15] * LANES))
        return builder.sitofp(builder.sub(nibbles, _INTS([8] * LANES)), _FLOATS)

    return lanes(codes, high), generate


@instruction
def look_up_nibbles(typing_context: Any, codes: Any, scale: Any, gain: Any, low: Any, high: Any) -> Any:
    """gain * (scale * code) of the lower and of the upper halves of bytes, rounded to 16 bits and stored.

    There are only 16 of these numbers in a block: LLVM computes them before the loop that this is in, and
    takes the two bytes of each element from two registers.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if low.dtype.bitwidth != 16 or not HAS_LOOKUP:
            return context.get_dummy_value()
        numbers = builder.fmul(
            _FLOATS([i - 8.0 for i in range(LANES)]), _broadcast(builder, args[1], _FLOATS)
        )
        numbers = builder.fmul(numbers, _broadcast(builder, args[2], _FLOATS))
        bits = builder.bitcast(round_lanes(builder, numbers, low.dtype), _SHORTS)
        tables = builder.trunc(bits, _BYTES), builder.trunc(builder.lshr(bits, _SHORTS([8] * LANES)), _BYTES)
        packed = _load_bytes(builder, args[0])
        lower = builder.and_(packed, _BYTES([15] * LANES))
        upper = builder.lshr(packed, _BYTES([4] * LANES))
        for nibbles, place in ((lower, args[3]), (upper, args[4])):
            both = [_look_up(builder, table, nibbles) for table in tables]
            pairs = ir.VectorType(_I32, 2 * LANES)([i // 2 + i % 2 * LANES for i in range(2 * LANES)])
            found = builder.shuffle_vector(*both, pairs)
            builder.store(found, builder.bitcast(place, found.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(codes, types.float32, types.float32, low, high), generate


def _look_up(builder: Any, table: Any, places: Any) -> Any:
    """table[places]."""
    function_type = ir.FunctionType(_BYTES, [_BYTES, _BYTES])
    shuffle = builder.module.declare_intrinsic("llvm.x86.ssse3.pshuf.b.128", (), function_type)
    return builder.call(shuffle, [table, places])


@instruction
def store_codes(typing_context: Any, steps: Any, codes: Any) -> Any:
    """Rounded to int8 codes; the scale leaves none beyond +-129, so that 16 bits can tell."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rounded = builder.trunc(_round(builder, args[0], _ROUNDER), _SHORTS)
        clamped = _choose(builder, "<", rounded, _SHORTS([127] * LANES))
        clamped = _choose(builder, ">", clamped, _SHORTS([-127] * LANES))
        _store_bytes(builder, builder.trunc(clamped, _BYTES), args[1])
        return context.get_dummy_value()

    return types.void(lanes, codes), generate


@instruction
def store_nibbles(typing_context: Any, low: Any, high: Any, codes: Any, smallest: Any) -> Any:
    """Rounded to int4 codes + 8, two in a byte. Below `smallest` (+ 8) there are none if that is 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        nibbles = []
        for steps in args[:2]:
            rounded = _round(builder, steps, _ROUNDER + 8)
            rounded = _choose(builder, "<", rounded, _INTS([_ROUNDER_BITS + 15] * LANES))
            if smallest.literal_value:
                rounded = _choose(
                    builder, ">", rounded, _INTS([_ROUNDER_BITS + smallest.literal_value] * LANES)
                )
            nibbles.append(rounded)
        both = builder.or_(nibbles[0], builder.shl(nibbles[1], _INTS([4] * LANES)))
        _store_bytes(builder, builder.trunc(both, _BYTES), args[2])
        return context.get_dummy_value()

    return types.void(lanes, lanes, codes, smallest), generate


@instruction
def add_noise(typing_context: Any, low: Any, high: Any, key: Any, column: Any) -> Any:
    """Elements from `column` on, and those half a block after them, with noise. See [Note: Noise] in
    noise.py."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = _broadcast(builder, builder.trunc(args[3], _I32), _INTS)
        columns = builder.add(first, _INTS(list(range(LANES))))
        bits = _mix(builder, builder.xor(columns, _broadcast(builder, args[2], _INTS)))
        bits = builder.or_(bits, _INTS([0x00010001] * LANES))
        # Noise * 2^32: 16 bits with a sign, in the upper half of 32.
        halves = builder.shl(bits, _INTS([16] * LANES)), builder.and_(bits, _INTS([-0x10000] * LANES))
        unit = _FLOATS([2.0**-32] * LANES)
        noisy = [
            multiply_add(builder, builder.sitofp(half, _FLOATS), unit, steps)
            for half, steps in zip(halves, args[:2], strict=True)
        ]
        return context.make_tuple(builder, signature.return_type, noisy)

    pair = types.UniTuple(lanes, 2)  # type: ignore[no-untyped-call]
    return pair(lanes, lanes, types.uint32, types.intp), generate


def _mix(builder: Any, bits: Any) -> Any:
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, None), strict=True):
        bits = builder.xor(bits, builder.lshr(bits, _INTS([shift] * LANES)))
        if multiplier is not None:
            bits = builder.mul(bits, _INTS([multiplier] * LANES))
    return bits


def _round(builder: Any, steps: Any, rounder: float) -> Any:
    return builder.bitcast(builder.fadd(steps, _FLOATS([rounder] * LANES)), _INTS)


def _choose(builder: Any, comparison: str, a: Any, b: Any) -> Any:
    """The smaller ones (<) or the larger ones (>) of integers."""
    return builder.select(builder.icmp_signed(comparison, a, b), a, b)


def _broadcast(builder: Any, value: Any, vector: Any) -> Any:
    one = builder.insert_element(vector(ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(one, vector(ir.Undefined), _INTS([0] * LANES))


def _load_bytes(builder: Any, place: Any) -> Any:
    return builder.load(builder.bitcast(place, _BYTES.as_pointer()), align=1)


def _store_bytes(builder: Any, values: Any, place: Any) -> None:
    builder.store(values, builder.bitcast(place, _BYTES.as_pointer()), align=1)
