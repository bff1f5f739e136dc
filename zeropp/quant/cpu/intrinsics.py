"""Intrinsics of the CPU kernels: LLVM instructions that numba has no words for. See kernels.py.

[Note: Elements]
    numba has no 16-bit floats, so bf16 comes as uint16 and fp16 as int16: `widen` and `narrow` tell them
    apart by this type. Rounding to bf16 takes no care of NaN: the ones we meet come from bf16 scales or from
    arithmetic, have zeros in their low mantissa bits, and so do not carry over into another number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from numba import njit, types
from numba.extending import intrinsic

# After numba: dispatch.py does without these kernels if numba is what is missing.
# isort: split
from llvmlite import ir  # type: ignore[import-untyped]

from ..rotation import AFTER, BEFORE, DISTANCES, GROUP, IS_NEGATIVE

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

LANES = 16  # LLVM makes two vectors of one where the CPU has only 8

_I32, _FLOAT = ir.IntType(32), ir.FloatType()
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_I32, LANES)


def inlined(function: Kernel) -> Kernel:
    """A part of a kernel. See [Note: Cache] in kernels.py."""
    return cast(Kernel, njit(nogil=True, error_model="numpy", forceinline=True)(function))


def instruction(generator: Callable[..., Any]) -> Any:
    """What numba cannot express, as LLVM instructions for the given types."""
    return intrinsic(prefer_literal=True)(generator)


@instruction
def widen(typing_context: Any, element: Any) -> Any:
    """The element as fp32. See [Note: Elements]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if element == types.float32:
            return args[0]
        if element == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _FLOAT)
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), _FLOAT)

    return types.float32(element), generate


@instruction
def narrow(typing_context: Any, value: Any, like: Any) -> Any:
    """The fp32 value rounded, to nearest even, to the type of the element `like`. See [Note: Elements]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like == types.float32:
            return args[0]
        if like == types.int16:
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
        return _round_to_bf16(builder, builder.bitcast(args[0], _I32))

    return like(types.float32, like), generate


def _bits(integers: dict[int, Any]) -> Any:
    def bits(typing_context: Any, element: Any) -> Any:
        integer = integers[element.bitwidth]

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(integer))

        return integer(element), generate

    return instruction(bits)


signed_bits = _bits({32: types.int32, 16: types.int16})
unsigned_bits = _bits({32: types.uint32, 16: types.uint16})


@instruction
def from_integer(typing_context: Any, bits: Any, like: Any) -> Any:
    """The element of the type of `like` with these bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(like))

    return like(bits, like), generate


@instruction
def pointer(typing_context: Any, values: Any, index: Any) -> Any:
    """A pointer to an element of an array, which must outlive it, or to one after another pointer's."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        is_array = isinstance(values, types.Array)
        base = context.make_array(values)(context, builder, args[0]).data if is_array else args[0]
        return builder.gep(base, [args[1]])

    return types.CPointer(values.dtype)(values, types.intp), generate  # type: ignore[no-untyped-call]


@instruction
def item_bytes(typing_context: Any, values: Any) -> Any:
    """Size of one of the elements that a pointer points to."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.intp, values.dtype.bitwidth // 8)

    return types.intp(values), generate


@instruction
def prefetch_line(typing_context: Any, values: Any, byte_offset: Any, for_write: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte_pointer = ir.IntType(8).as_pointer()
        line = builder.gep(builder.bitcast(args[0], byte_pointer), [args[1]])
        function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, _I32, _I32, _I32])
        function = builder.module.declare_intrinsic("llvm.prefetch.p0", (), function_type)
        keep_in_all_levels, data = _I32(3), _I32(1)
        builder.call(function, [line, _I32(for_write.literal_value), keep_in_all_levels, data])
        return context.get_dummy_value()

    return types.void(values, types.intp, for_write), generate


@instruction
def rotate_group(typing_context: Any, source: Any, out: Any, largest: Any, inverse: Any) -> Any:
    """Rotate 64 elements, or turn them back, from any type into any. See [Note: Rotation] in rotation.py."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        signs = [-1.0 if negative else 1.0 for negative in IS_NEGATIVE]
        before = [BEFORE if inverse.literal_value else BEFORE * sign for sign in signs]
        group = []
        for start in range(0, GROUP, LANES):
            lanes = load_lanes(builder, builder.gep(args[0], [_I32(start)]), source.dtype)
            group.append(builder.fmul(lanes, _FLOATS(before[start : start + LANES])))
        for distance in DISTANCES:
            group = _stage(builder, group, distance)
        poison = builder.fsub(group[0], group[0])
        for start, lanes in zip(range(0, GROUP, LANES), group, strict=True):
            scaled = _scale_up(builder, lanes, args[2], poison)
            if inverse.literal_value:
                scaled = builder.fmul(scaled, _FLOATS(signs[start : start + LANES]))
            store_lanes(builder, scaled, builder.gep(args[1], [_I32(start)]), out.dtype)
        return context.get_dummy_value()

    return types.void(source, out, types.float32, inverse), generate


def load_lanes(builder: Any, place: Any, element: Any) -> Any:
    """Elements as fp32. See [Note: Elements]."""
    if element == types.float32:
        return builder.load(builder.bitcast(place, _FLOATS.as_pointer()), align=4)
    if element == types.int16:
        halves = ir.VectorType(ir.HalfType(), LANES)
        return builder.fpext(builder.load(builder.bitcast(place, halves.as_pointer()), align=2), _FLOATS)
    shorts = ir.VectorType(ir.IntType(16), LANES)
    bits = builder.zext(builder.load(builder.bitcast(place, shorts.as_pointer()), align=2), _INTS)
    return builder.bitcast(builder.shl(bits, _INTS([16] * LANES)), _FLOATS)


def store_lanes(builder: Any, lanes: Any, place: Any, element: Any) -> None:
    rounded = round_lanes(builder, lanes, element)
    builder.store(rounded, builder.bitcast(place, rounded.type.as_pointer()), align=element.bitwidth // 8)


def round_lanes(builder: Any, lanes: Any, element: Any) -> Any:
    """fp32 as elements."""
    if element == types.float32:
        return lanes
    if element == types.int16:
        return builder.fptrunc(lanes, ir.VectorType(ir.HalfType(), LANES))
    return _round_to_bf16(builder, builder.bitcast(lanes, _INTS))


def _round_to_bf16(builder: Any, bits: Any) -> Any:
    """The upper 16 bits, to nearest even; of one or of several numbers."""
    several = isinstance(bits.type, ir.VectorType)

    def constant(value: int) -> Any:
        return _INTS([value] * LANES) if several else _I32(value)

    last_bit_kept = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.add(builder.add(bits, constant(0x7FFF)), last_bit_kept)
    short = ir.IntType(16)
    return builder.trunc(
        builder.lshr(rounded, constant(16)), ir.VectorType(short, LANES) if several else short
    )


def _stage(builder: Any, group: Sequence[Any], distance: int) -> list[Any]:
    """(a + b, a - b) of all elements a and b at this distance."""
    if distance >= LANES:
        step = distance // LANES
        return [
            builder.fsub(group[i - step], lanes) if i & step else builder.fadd(lanes, group[i + step])
            for i, lanes in enumerate(group)
        ]
    others = _INTS([i ^ distance for i in range(LANES)])
    signs = _FLOATS([-1.0 if i & distance else 1.0 for i in range(LANES)])
    swapped = [builder.shuffle_vector(lanes, _FLOATS(ir.Undefined), others) for lanes in group]
    return [multiply_add(builder, lanes, signs, other) for lanes, other in zip(group, swapped, strict=True)]


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, fused or not: only where the product is exact, so that the bits are the same."""
    function_type = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    name = f"llvm.fmuladd.v{LANES}f32"
    return builder.call(builder.module.declare_intrinsic(name, (), function_type), [a, b, c])


def _scale_up(builder: Any, lanes: Any, largest: Any, poison: Any) -> Any:
    """The factor after the stages, with finite numbers cut to +-largest.

    `poison` is 0, or NaN in a group that is not finite. All sums of such a group are not finite: any of them
    can tell.
    """
    limit = builder.fdiv(largest, _FLOAT(AFTER))
    limits = builder.insert_element(_FLOATS(ir.Undefined), limit, _I32(0))
    limits = builder.shuffle_vector(limits, _FLOATS(ir.Undefined), _INTS([0] * LANES))
    negative_limits = builder.fsub(_FLOATS([0.0] * LANES), limits)
    cut = builder.select(builder.fcmp_ordered("<", lanes, limits), lanes, limits)
    cut = builder.select(builder.fcmp_ordered(">", cut, negative_limits), cut, negative_limits)
    return multiply_add(builder, cut, _FLOATS([AFTER] * LANES), poison)
