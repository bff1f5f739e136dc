"""Sixteen numbers at a time, as one value of numba's: the instructions that kernels.py is written in.

LLVM's own vectorizer gives every type of a loop the same number of lanes, as many as the widest type has in a
register. With AVX2 it packs codes by eights, and rounds, clamps and shifts bytes as 32-bit integers. Here the
number of lanes is fixed, LLVM cuts them into the registers of the CPU, and each step uses its own type.

[Note: Elements]
    numba has no 16-bit floats, so bf16 is passed as uint16 and fp16 as int16. `load` and `store` tell them
    apart by this type. Rounding to bf16 ignores NaN: every NaN here comes from a bf16 scale or from
    arithmetic, has zeros in its low mantissa bits, and so does not carry into another number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from numba import config, types
from numba.core.codegen import get_host_cpu_features
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model

# After numba: if numba is missing, dispatch.py expects its name in the ModuleNotFoundError.
# isort: split
from llvmlite import ir  # type: ignore[import-untyped]

from ..noise import MULTIPLIERS, SHIFTS
from ..rotation import AFTER, BEFORE, DISTANCES, GROUP, IS_NEGATIVE

LANES = 16  # LLVM makes two vectors of one if the CPU has only 8

_I8, _I16, _I32, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_BYTES, _SHORTS, _INTS, _HALVES, _FLOATS = (
    ir.VectorType(each, LANES) for each in (_I8, _I16, _I32, ir.HalfType(), _FLOAT)
)

# Adding 1.5 * 2^23 rounds a small float to an integer, to nearest even, and leaves it in the low bits.
_ROUNDER = 1.5 * 2**23
_ROUNDER_BITS = 0x4B400000

# Whether the CPU can look up bytes in a register: any x86-64 since 2006.
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


def instruction(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make emit(builder, types, *values), which emits LLVM instructions, a function of numba's.

    `result` is the type of the result, or a function of the types of the arguments. Each of `parameters` is
    the type that numba converts an argument to; None takes any type. A list that `emit` returns is a tuple.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def typed(typing_context: Any, *given: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                emitted = emit(builder, given, *values)
                if isinstance(emitted, list):
                    return context.make_tuple(builder, signature.return_type, emitted)
                return context.get_dummy_value() if emitted is None else emitted

            returned = result if isinstance(result, types.Type) else result(*given)
            taken = [wanted or own for wanted, own in zip(parameters, given, strict=True)]
            return returned(*taken), generate

        names = inspect.signature(emit).parameters.values()
        typed.__name__, typed.__signature__ = emit.__name__, inspect.Signature(list(names)[1:])  # type: ignore[attr-defined]
        return intrinsic(prefer_literal=True)(typed)

    return decorate


# Memory.


def _pointer(typing_context: Any, values: Any, index: Any) -> Any:
    """A pointer to an element of an array, which must outlive it, or to one after another pointer's."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        is_array = isinstance(values, types.Array)
        base = context.make_array(values)(context, builder, args[0]).data if is_array else args[0]
        return builder.gep(base, [args[1]])

    return types.CPointer(values.dtype)(values, types.intp), generate  # type: ignore[no-untyped-call]


pointer: Any = intrinsic(_pointer)


@instruction(types.int64, None)
def item_bytes(builder: Any, given: Any, values: Any) -> Any:
    """Size of an element that a pointer points to."""
    return ir.IntType(64)(given[0].dtype.bitwidth // 8)


@instruction(types.void, None, types.intp, None)
def prefetch_line(builder: Any, given: Any, values: Any, byte_offset: Any, for_write: Any) -> None:
    line = builder.gep(builder.bitcast(values, _I8.as_pointer()), [byte_offset])
    function_type = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = builder.module.declare_intrinsic("llvm.prefetch.p0", (), function_type)
    keep_in_all_levels, data = _I32(3), _I32(1)
    builder.call(function, [line, _I32(given[2].literal_value), keep_in_all_levels, data])


@instruction(lanes, None)
def load(builder: Any, given: Any, place: Any) -> Any:
    return _load_floats(builder, place, given[0].dtype)


@instruction(types.void, lanes, None)
def store(builder: Any, given: Any, values: Any, place: Any) -> None:
    """Store numbers, rounded to nearest even."""
    _store_floats(builder, values, place, given[1].dtype)


@instruction(lambda x, signed: types.Integer.from_bitwidth(x.bitwidth, signed.literal_value), None, None)
def bits_of(builder: Any, given: Any, element: Any, signed: Any) -> Any:
    """The bits of one element, as an integer of its size."""
    return builder.bitcast(element, ir.IntType(given[0].bitwidth))


@instruction(types.float32, None, None)
def from_bits_like(builder: Any, given: Any, bits: Any, place: Any) -> Any:
    """The fp32 number of an element with these bits, of the type that `place` points to."""
    vector = ir.VectorType(bits.type, LANES)(ir.Undefined)
    floats = _to_floats(builder, builder.insert_element(vector, bits, _I32(0)), given[1].dtype)
    return builder.extract_element(floats, _I32(0))


# Arithmetic.


@instruction(lanes, lanes, lanes)
def plus(builder: Any, given: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


@instruction(lanes, lanes, types.float32)
def times(builder: Any, given: Any, a: Any, b: Any) -> Any:
    return builder.fmul(a, _broadcast(builder, b))


@instruction(lanes, lanes, types.float32, lanes)
def times_plus(builder: Any, given: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, fused or not: only where products are exact."""
    return _multiply_add(builder, a, _broadcast(builder, b), c)


@instruction(lanes, lanes, types.float32)
def cut(builder: Any, given: Any, values: Any, largest: Any) -> Any:
    """Finite numbers cut to +-largest; NaN and Inf become NaN."""
    return builder.fadd(_clamp(builder, values, largest), builder.fsub(values, values))


# Codes.


@instruction(lanes, None)
def from_codes(builder: Any, given: Any, codes: Any) -> Any:
    """Numbers of int8 codes."""
    return builder.sitofp(builder.sext(_load_bytes(builder, codes), _INTS), _FLOATS)


@instruction(lanes, None, None)
def from_nibbles(builder: Any, given: Any, codes: Any, high: Any) -> Any:
    """Numbers of int4 codes, in the upper or in the lower half of each byte."""
    packed = builder.zext(_load_bytes(builder, codes), _INTS)
    is_high = given[1].literal_value
    nibbles = builder.lshr(packed, _ints(4)) if is_high else builder.and_(packed, _ints(15))
    return builder.sitofp(builder.sub(nibbles, _ints(8)), _FLOATS)


@instruction(types.void, None, types.float32, types.float32, None, None)
def look_up_nibbles(builder: Any, given: Any, codes: Any, scale: Any, gain: Any, low: Any, high: Any) -> None:
    """Store gain * (scale * code) of the lower and of the upper halves of bytes, rounded to 16 bits.

    A block has only 16 of these numbers. LLVM computes them before the loop that this is in, and takes the
    two bytes of each element from two registers.
    """
    element = given[3].dtype
    if element.bitwidth != 16 or not HAS_LOOKUP:
        return
    numbers = builder.fmul(_FLOATS([i - 8.0 for i in range(LANES)]), _broadcast(builder, scale))
    numbers = builder.fmul(numbers, _broadcast(builder, gain))
    bits = builder.bitcast(_round_floats(builder, numbers, element), _SHORTS)
    tables = builder.trunc(bits, _BYTES), builder.trunc(builder.lshr(bits, _SHORTS([8] * LANES)), _BYTES)
    packed = _load_bytes(builder, codes)
    lower, upper = builder.and_(packed, _BYTES([15] * LANES)), builder.lshr(packed, _BYTES([4] * LANES))
    function_type = ir.FunctionType(_BYTES, [_BYTES, _BYTES])
    shuffle = builder.module.declare_intrinsic("llvm.x86.ssse3.pshuf.b.128", (), function_type)
    pairs = ir.VectorType(_I32, 2 * LANES)([i // 2 + i % 2 * LANES for i in range(2 * LANES)])
    for nibbles, place in ((lower, low), (upper, high)):
        both = [builder.call(shuffle, [table, nibbles]) for table in tables]
        _store_vector(builder, builder.shuffle_vector(*both, pairs), place, align=2)


@instruction(types.void, lanes, None)
def store_codes(builder: Any, given: Any, steps: Any, codes: Any) -> None:
    """Store numbers rounded to int8 codes. The scale leaves none beyond +-129, so 16 bits hold them."""
    rounded = builder.trunc(_round(builder, steps, _ROUNDER), _SHORTS)
    clamped = _choose(builder, "<", rounded, _SHORTS([127] * LANES))
    clamped = _choose(builder, ">", clamped, _SHORTS([-127] * LANES))
    _store_vector(builder, builder.trunc(clamped, _BYTES), codes, align=1)


@instruction(types.void, lanes, lanes, None, None)
def store_nibbles(builder: Any, given: Any, low: Any, high: Any, codes: Any, smallest: Any) -> None:
    """Store numbers rounded to int4 codes + 8, two in a byte. If `smallest` is 0, none is below it."""
    nibbles = []
    for steps in (low, high):
        rounded = _round(builder, steps, _ROUNDER + 8)
        rounded = _choose(builder, "<", rounded, _ints(_ROUNDER_BITS + 15))
        if given[3].literal_value:
            rounded = _choose(builder, ">", rounded, _ints(_ROUNDER_BITS + given[3].literal_value))
        nibbles.append(rounded)
    both = builder.or_(nibbles[0], builder.shl(nibbles[1], _ints(4)))
    _store_vector(builder, builder.trunc(both, _BYTES), codes, align=1)


@instruction(types.UniTuple(lanes, 2), lanes, lanes, types.uint32, types.intp)  # type: ignore[no-untyped-call]
def add_noise(builder: Any, given: Any, low: Any, high: Any, key: Any, column: Any) -> Any:
    """Add noise to elements from `column` on, and to those half a block after them.

    `key` is seed_key + row; see [Note: Noise] in noise.py.
    """
    columns = builder.add(_broadcast(builder, builder.trunc(column, _I32)), _INTS(list(range(LANES))))
    bits = _mix(builder, builder.xor(columns, _mix(builder, _broadcast(builder, key))))
    bits = builder.or_(bits, _ints(0x00010001))
    # Noise * 2^32: 16 bits with a sign, in the upper half of 32.
    halves = builder.shl(bits, _ints(16)), builder.and_(bits, _ints(-0x10000))
    return [
        _multiply_add(builder, builder.sitofp(half, _FLOATS), _floats(2.0**-32), steps)
        for half, steps in zip(halves, (low, high), strict=True)
    ]


def _mix(builder: Any, bits: Any) -> Any:
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        bits = builder.xor(bits, builder.lshr(bits, _ints(shift)))
        bits = builder.mul(bits, _ints(multiplier))
    return bits


# Rotation.


@instruction(types.void, None, None, types.float32, None)
def rotate_group(builder: Any, given: Any, source: Any, out: Any, largest: Any, inverse: Any) -> None:
    """Rotate 64 elements of any type, or turn them back. See [Note: Rotation] in rotation.py."""
    is_inverse = given[3].literal_value
    signs = [-1.0 if negative else 1.0 for negative in IS_NEGATIVE]
    before = [BEFORE if is_inverse else BEFORE * sign for sign in signs]
    group = []
    for start in range(0, GROUP, LANES):
        numbers = _load_floats(builder, builder.gep(source, [_I32(start)]), given[0].dtype)
        group.append(builder.fmul(numbers, _FLOATS(before[start : start + LANES])))
    for distance in DISTANCES:
        group = _stage(builder, group, distance)
    # 0, or NaN if the group is not finite. Then no sum of the group is finite, so the first ones suffice.
    poison = builder.fsub(group[0], group[0])
    limit = builder.fdiv(largest, _FLOAT(AFTER))
    for start, numbers in zip(range(0, GROUP, LANES), group, strict=True):
        scaled = _multiply_add(builder, _clamp(builder, numbers, limit), _floats(AFTER), poison)
        if is_inverse:
            scaled = builder.fmul(scaled, _FLOATS(signs[start : start + LANES]))
        _store_floats(builder, scaled, builder.gep(out, [_I32(start)]), given[1].dtype)


def _stage(builder: Any, group: Sequence[Any], distance: int) -> list[Any]:
    """(a + b, a - b) of all elements a and b at this distance."""
    if distance >= LANES:
        step = distance // LANES
        return [
            builder.fsub(group[i - step], numbers) if i & step else builder.fadd(numbers, group[i + step])
            for i, numbers in enumerate(group)
        ]
    others = _INTS([i ^ distance for i in range(LANES)])
    signs = _FLOATS([-1.0 if i & distance else 1.0 for i in range(LANES)])
    swapped = [builder.shuffle_vector(numbers, _FLOATS(ir.Undefined), others) for numbers in group]
    return [_multiply_add(builder, a, signs, b) for a, b in zip(group, swapped, strict=True)]


# What instructions are made of.


def _ints(value: int) -> Any:
    return _INTS([value] * LANES)


def _floats(value: float) -> Any:
    return _FLOATS([value] * LANES)


def _load_floats(builder: Any, place: Any, element: Any) -> Any:
    integers = ir.VectorType(ir.IntType(element.bitwidth), LANES)
    bits = builder.load(builder.bitcast(place, integers.as_pointer()), align=element.bitwidth // 8)
    return _to_floats(builder, bits, element)


def _to_floats(builder: Any, bits: Any, element: Any) -> Any:
    """Elements as fp32. See [Note: Elements]."""
    if element == types.float32:
        return builder.bitcast(bits, _FLOATS)
    if element == types.int16:
        return builder.fpext(builder.bitcast(bits, _HALVES), _FLOATS)
    return builder.bitcast(builder.shl(builder.zext(bits, _INTS), _ints(16)), _FLOATS)


def _round_floats(builder: Any, numbers: Any, element: Any) -> Any:
    """fp32 as elements."""
    if element == types.float32:
        return numbers
    if element == types.int16:
        return builder.fptrunc(numbers, _HALVES)
    bits = builder.bitcast(numbers, _INTS)
    last_bit_kept = builder.and_(builder.lshr(bits, _ints(16)), _ints(1))
    rounded = builder.add(builder.add(bits, _ints(0x7FFF)), last_bit_kept)
    return builder.trunc(builder.lshr(rounded, _ints(16)), _SHORTS)


def _store_floats(builder: Any, numbers: Any, place: Any, element: Any) -> None:
    _store_vector(builder, _round_floats(builder, numbers, element), place, align=element.bitwidth // 8)


def _load_bytes(builder: Any, place: Any) -> Any:
    return builder.load(builder.bitcast(place, _BYTES.as_pointer()), align=1)


def _store_vector(builder: Any, values: Any, place: Any, align: int) -> None:
    builder.store(values, builder.bitcast(place, values.type.as_pointer()), align=align)


def _broadcast(builder: Any, value: Any) -> Any:
    vector = ir.VectorType(value.type, LANES)(ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(vector, value, _I32(0)), vector, _ints(0))


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, fused or not: only where the product is exact, so the bits are the same."""
    function_type = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    name = f"llvm.fmuladd.v{LANES}f32"
    return builder.call(builder.module.declare_intrinsic(name, (), function_type), [a, b, c])


def _clamp(builder: Any, numbers: Any, largest: Any) -> Any:
    limits = _broadcast(builder, largest)
    negative_limits = builder.fsub(_floats(0.0), limits)
    clamped = builder.select(builder.fcmp_ordered("<", numbers, limits), numbers, limits)
    return builder.select(builder.fcmp_ordered(">", clamped, negative_limits), clamped, negative_limits)


def _round(builder: Any, steps: Any, rounder: float) -> Any:
    return builder.bitcast(builder.fadd(steps, _floats(rounder)), _INTS)


def _choose(builder: Any, comparison: str, a: Any, b: Any) -> Any:
    """The smaller ones (<) or the larger ones (>) of integers."""
    return builder.select(builder.icmp_signed(comparison, a, b), a, b)
