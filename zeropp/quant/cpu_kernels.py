"""The block formats compiled for the CPU by numba. Shapes, checks and threads are in cpu.py.

A kernel works on a range of *tiles*, some blocks each, so that threads can share a call; tile t of row r is
number r * tiles + t. Buffers are flat, with the distance between rows beside them, to serve every view.

[Note: Elements]
    numba has no 16-bit floats, so bf16 comes as uint16 and fp16 as int16: `widen` and `narrow` tell them
    apart by this type. Rounding to bf16 takes no care of NaN: the ones we meet come from bf16 scales or from
    arithmetic, have zeros in their low mantissa bits, and so do not carry over into another number.

[Note: Speed]
    - Blocks are pointers: slices are reference counted, and their indices checked for being negative.
    - Integers are cast after every operation, since numba widens each result to 64 bits.
    - Lines are prefetched some pages ahead: the hardware stops at the end of each page, and does not fetch
      lines that are only written. Encode and decode would take 1.3 to 1.6 times as long.
    - A tile is encoded in three passes over its blocks, so that no block waits for its own scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numpy import float32, int8, int32, uint8, uint16, uint32
from numpy.typing import NDArray

# After numba: dispatch.py does without these kernels if numba is what is missing.
# isort: split
from llvmlite import ir  # type: ignore[import-untyped]

from .formats import MIN_SCALE, NAN_SCALE_BITS, SCALE_BYTES

Array = NDArray[Any]
Pointer = Any  # to the first of several elements: indexed like an array, unchecked
Tile = tuple[Pointer, Pointer]  # payload and scales of some blocks of a row
Format = tuple[int, int]  # bits and block size
Kernel = TypeVar("Kernel", bound=Callable[..., Any])

PREFETCH_BYTES = 8192
CACHE_LINE_BYTES = 64

_FP32_MAX = float32(np.finfo(np.float32).max)
_NAN_SCALE = uint32(NAN_SCALE_BITS << 16).view(float32)
_I32 = ir.IntType(32)
# Adding 1.5 * 2^23 rounds a small float to an integer, to nearest even, and leaves it in the low bits.
_ROUNDER = float32(1.5 * 2**23)
_ROUNDER_BITS = int32(0x4B400000)


def kernel(function: Kernel) -> Kernel:
    """Compiled once per machine, then cached. Never fastmath: the bytes must equal the reference's."""
    return cast(Kernel, njit(nogil=True, cache=True, error_model="numpy")(function))


def inlined(function: Kernel) -> Kernel:
    """A part of a kernel. In the same file, because numba's cache looks at no other for changes."""
    return cast(Kernel, njit(nogil=True, error_model="numpy", forceinline=True)(function))


def instruction(generator: Callable[..., Any]) -> Any:
    """What numba cannot express, as LLVM instructions for the given types."""
    return intrinsic(prefer_literal=True)(generator)


@kernel
def encode_range(
    source: Array,
    source_stride: int,
    order: Array,
    out: Array,
    out_stride: int,
    numel: int,
    fmt: Format,
    tile_size: int,
    limit: float32,
    first: int,
    last: int,
) -> None:
    block_size = fmt[1]
    tiles = -(-numel // tile_size)
    padded = np.empty(tile_size, float32)
    extremes = np.empty(tile_size // block_size, float32)
    for index in range(first, last):
        row, begin = index // tiles, index % tiles * tile_size
        count = min(tile_size, numel - begin)
        x = pointer(source, order[row] * source_stride + begin)
        tile = find_tile(out, row * out_stride, numel, fmt, begin)
        if count == tile_size:
            for i in range(tile_size // block_size):
                prefetch(pointer(x, i * block_size), block_size * source.itemsize, False)
                extremes[i] = find_extreme(pointer(x, i * block_size), block_size)
            encode_blocks(x, pointer(extremes, 0), tile_size // block_size, fmt, limit, tile)
        else:
            for i in range(count):
                padded[i] = widen(x[i])
            encode_partial(pointer(padded, 0), count, pointer(extremes, 0), fmt, limit, tile)


@kernel
def decode_range(
    encoded: Array,
    senders: int,
    strides: tuple[int, int],
    out: Array,
    out_stride: int,
    order: Array,
    numel: int,
    fmt: Format,
    tile_size: int,
    factor: float32,
    accumulate: bool,
    first: int,
    last: int,
) -> None:
    block_size = fmt[1]
    sender_stride, encoded_stride = strides
    tiles = -(-numel // tile_size)
    total = np.empty(tile_size, float32)
    for index in range(first, last):
        row, begin = index // tiles, index % tiles * tile_size
        count = min(tile_size, numel - begin)
        values = pointer(out, order[row] * out_stride + begin)
        tile = find_tile(encoded, row * encoded_stride, numel, fmt, begin)
        if senders == 1 and factor == 1 and count == tile_size and not accumulate:
            for i in range(tile_size // block_size):
                prefetch(pointer(values, i * block_size), block_size * out.itemsize, True)
                decode_block(tile, i, fmt, pointer(values, i * block_size))
            continue
        sum_blocks(tile, senders, sender_stride, count, fmt, pointer(total, 0))
        for start in range(0, count, block_size):
            sums, target = pointer(total, start), pointer(values, start)
            prefetch(target, block_size * out.itemsize, True)
            if accumulate:
                for i in range(min(block_size, count - start)):
                    target[i] = narrow(widen(target[i]) + sums[i] * factor, target[i])
            else:
                for i in range(min(block_size, count - start)):
                    target[i] = narrow(sums[i] * factor, target[i])


@kernel
def recode_range(
    encoded: Array,
    senders: int,
    strides: tuple[int, int],
    fmt: Format,
    out: Array,
    out_stride: int,
    into: Format,
    numel: int,
    tile_size: int,
    factor: float32,
    first: int,
    last: int,
) -> None:
    sender_stride, encoded_stride = strides
    tiles = -(-numel // tile_size)
    total = np.empty(tile_size, float32)
    extremes = np.empty(tile_size // into[1], float32)
    for index in range(first, last):
        row, begin = index // tiles, index % tiles * tile_size
        count = min(tile_size, numel - begin)
        sums = pointer(total, 0)
        tile = find_tile(encoded, row * encoded_stride, numel, fmt, begin)
        sum_blocks(tile, senders, sender_stride, count, fmt, sums)
        for i in range(count):
            sums[i] *= factor
        tile = find_tile(out, row * out_stride, numel, into, begin)
        encode_partial(sums, count, pointer(extremes, 0), into, _FP32_MAX, tile)


@inlined
def find_tile(encoded: Array, row_at: int, numel: int, fmt: Format, begin: int) -> Tile:
    """The blocks from element `begin` of a row on."""
    bits, block_size = fmt
    payload_bytes = -(-numel // block_size) * block_size * bits // 8
    scales = pointer(encoded, row_at + payload_bytes + begin // block_size * SCALE_BYTES)
    return pointer(encoded, row_at + begin * bits // 8), scales


@inlined
def encode_partial(
    x: Pointer, count: int, extremes: Pointer, fmt: Format, limit: float32, tile: Tile
) -> None:
    """A tile in scratch memory, of which only `count` elements are there."""
    block_size = fmt[1]
    blocks = -(-count // block_size)
    for i in range(count, blocks * block_size):
        x[i] = float32(0)
    for i in range(blocks):
        extremes[i] = find_extreme(pointer(x, i * block_size), block_size)
    encode_blocks(x, extremes, blocks, fmt, limit, tile)


@inlined
def encode_blocks(
    x: Pointer, extremes: Pointer, blocks: int, fmt: Format, limit: float32, tile: Tile
) -> None:
    """The second and third pass over the blocks; overwrites extremes."""
    (bits, block_size), (payload, scales) = fmt, tile
    inverses = extremes
    for i in range(blocks):
        scale = choose_scale(extremes[i], bits, limit)
        scales[i * SCALE_BYTES] = uint8(to_bits(scale) >> uint32(16))
        scales[i * SCALE_BYTES + 1] = uint8(to_bits(scale) >> uint32(24))
        inverses[i] = float32(1.0) / scale
    for i in range(blocks):
        codes = pointer(payload, i * (block_size * bits // 8))
        encode_block(pointer(x, i * block_size), inverses[i], fmt, codes)


@inlined
def encode_block(x: Pointer, inverse: float32, fmt: Format, codes: Pointer) -> None:
    bits, block_size = fmt
    if np.isnan(inverse):
        for i in range(block_size * bits // 8):
            codes[i] = uint8(0 if bits == 8 else 0x88)
    elif bits == 8:
        for i in range(block_size):
            code = int32(int32(to_bits(widen(x[i]) * inverse + _ROUNDER)) - _ROUNDER_BITS)
            codes[i] = uint8(min(max(code, int32(-127)), int32(127)))
    else:
        half = block_size // 2
        x_high = pointer(x, half)
        for i in range(half):
            low, high = to_nibble(widen(x[i]) * inverse), to_nibble(widen(x_high[i]) * inverse)
            codes[i] = uint8(low | int32(high << int32(4)))


@inlined
def to_nibble(steps: float32) -> int32:
    """Code + 8, in the low four bits. The code is at least -8, by the choice of the scale."""
    rounded = int32(to_bits(steps + (_ROUNDER + float32(8))))
    return int32(min(rounded, int32(_ROUNDER_BITS + 15)))


@inlined
def find_extreme(x: Pointer, count: int) -> float32:
    """The element of the largest magnitude, the negative one of two; NaN or Inf if there is any.

    Found as an integer, with the sign moved to the lowest bit: a maximum of floats would lose NaN.
    """
    largest = uint32(0)
    for i in range(count):
        bits = to_bits(widen(x[i]))
        largest = max(largest, uint32(uint32(bits << uint32(1)) | uint32(bits >> uint32(31))))
    return from_bits(uint32(largest >> uint32(1)) | uint32(largest << uint32(31)))


@inlined
def choose_scale(extreme: float32, bits: int, limit: float32) -> float32:
    """See [Note: Scales] in formats.py. `limit` is the largest number of the source's dtype."""
    if not np.isfinite(extreme):
        return _NAN_SCALE
    exact = abs(extreme) * float32(1.0 / 127) if bits == 8 else extreme * float32(-0.125)
    scale: float32 = widen(narrow(exact + float32(0), uint16(0)))  # of zeros: not -0.0
    if abs(scale) * float32(127 if bits == 8 else 8) > limit:
        scale = from_bits(to_bits(exact) & uint32(0xFFFF0000))
    if abs(scale) < float32(MIN_SCALE):
        scale = np.copysign(float32(MIN_SCALE), scale)
    return scale


@inlined
def sum_blocks(tile: Tile, senders: int, sender_stride: int, count: int, fmt: Format, sums: Pointer) -> None:
    """The sum over senders of the blocks of `count` elements, in the order of the senders."""
    block_size = fmt[1]
    blocks = -(-count // block_size)
    for i in range(blocks):
        decode_block(tile, i, fmt, pointer(sums, i * block_size))
    for _ in range(1, senders):
        tile = pointer(tile[0], sender_stride), pointer(tile[1], sender_stride)
        for i in range(blocks):
            add_block(tile, i, fmt, pointer(sums, i * block_size))


@inlined
def decode_block(tile: Tile, block: int, fmt: Format, out: Pointer) -> None:
    codes, scale = read_block(tile, block, fmt)
    bits, block_size = fmt
    if bits == 8:
        for i in range(block_size):
            out[i] = narrow(float32(int8(codes[i])) * scale, out[i])
    else:
        half = block_size // 2
        out_high = pointer(out, half)
        for i in range(half):
            out[i] = narrow(from_nibble(codes[i] & uint8(15)) * scale, out[i])
            out_high[i] = narrow(from_nibble(codes[i] >> uint8(4)) * scale, out_high[i])


@inlined
def add_block(tile: Tile, block: int, fmt: Format, sums: Pointer) -> None:
    codes, scale = read_block(tile, block, fmt)
    bits, block_size = fmt
    prefetch(codes, block_size * bits // 8, False)
    if bits == 8:
        for i in range(block_size):
            sums[i] += float32(int8(codes[i])) * scale
    else:
        half = block_size // 2
        sums_high = pointer(sums, half)
        for i in range(half):
            sums[i] += from_nibble(codes[i] & uint8(15)) * scale
            sums_high[i] += from_nibble(codes[i] >> uint8(4)) * scale


@inlined
def read_block(tile: Tile, block: int, fmt: Format) -> tuple[Pointer, float32]:
    """The codes and the scale."""
    (payload, scales), (bits, block_size) = tile, fmt
    low = uint32(uint32(scales[block * SCALE_BYTES]) << uint32(16))
    high = uint32(uint32(scales[block * SCALE_BYTES + 1]) << uint32(24))
    return pointer(payload, block * (block_size * bits // 8)), from_bits(low | high)


@inlined
def from_nibble(nibble: uint8) -> float32:
    return float32(int32(int32(nibble) - int32(8)))


@inlined
def to_bits(value: float32) -> uint32:
    return float32(value).view(uint32)


@inlined
def from_bits(bits: uint32) -> float32:
    return uint32(bits).view(float32)


@instruction
def widen(typing_context: Any, element: Any) -> Any:
    """The element as fp32. See [Note: Elements]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if element == types.float32:
            return args[0]
        if element == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), ir.FloatType())

    return types.float32(element), generate


@instruction
def narrow(typing_context: Any, value: Any, like: Any) -> Any:
    """The fp32 value rounded, to nearest even, to the type of the element `like`. See [Note: Elements]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like == types.float32:
            return args[0]
        if like == types.int16:
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
        bits = builder.bitcast(args[0], _I32)
        last_bit_kept = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.add(builder.add(bits, _I32(0x7FFF)), last_bit_kept)
        return builder.trunc(builder.lshr(rounded, _I32(16)), ir.IntType(16))

    return like(types.float32, like), generate


@instruction
def pointer(typing_context: Any, values: Any, index: Any) -> Any:
    """To an element of an array, which must outlive it, or to one after another pointer's."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        is_array = isinstance(values, types.Array)
        base = context.make_array(values)(context, builder, args[0]).data if is_array else args[0]
        return builder.gep(base, [args[1]])

    return types.CPointer(values.dtype)(values, types.intp), generate  # type: ignore[no-untyped-call]


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


@inlined
def prefetch(values: Pointer, nbytes: int, for_write: bool) -> None:
    """Only a hint: addresses beyond the buffer are harmless."""
    for i in range(PREFETCH_BYTES, PREFETCH_BYTES + nbytes, CACHE_LINE_BYTES):
        if for_write:
            prefetch_line(values, i, 1)
        else:
            prefetch_line(values, i, 0)
