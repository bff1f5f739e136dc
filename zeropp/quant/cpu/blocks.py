"""Blocks, encoded and decoded: the parts that the kernels of kernels.py are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import float32, uint8, uint16, uint32
from numpy.typing import NDArray

from ..formats import MIN_SCALE, NAN_SCALE_BITS, SCALE_BYTES
from ..noise import MULTIPLIERS, SHIFTS
from .intrinsics import (
    LANES,
    from_integer,
    inlined,
    item_bytes,
    narrow,
    pointer,
    prefetch_line,
    signed_bits,
    unsigned_bits,
    widen,
)
from .simd import (
    HAS_LOOKUP,
    add_noise,
    from_codes,
    from_nibbles,
    load,
    look_up_nibbles,
    plus,
    store,
    store_codes,
    store_nibbles,
    times,
    times_plus,
)

Array = NDArray[Any]
Pointer = Any  # to the first of several elements: indexed like an array, unchecked
Tile = tuple[Pointer, Pointer]  # payload and scales of some blocks of a row
Format = tuple[int, int]  # bits and block size
Noise = tuple[uint32, int]  # key of a call, and its offset; see [Note: Noise] in noise.py
Place = tuple[int, int]  # row, and the first element of it

PREFETCH_BYTES = 8192
CACHE_LINE_BYTES = 64

_NAN_SCALE = uint32(NAN_SCALE_BITS << 16).view(float32)
# A code times a smaller scale cannot overflow, and is exact: a fused multiply-add changes no bit.
_SMALL_SCALE = float32(2.0**120)
_SHIFTS, _MULTIPLIERS = tuple(map(uint32, SHIFTS)), tuple(map(uint32, MULTIPLIERS))


@inlined
def encode_blocks(
    x: Pointer,
    extremes: Pointer,
    blocks: int,
    fmt: Format,
    noise: Noise | None,
    place: Place,
    limit: float32,
    tile: Tile,
) -> None:
    """The second and third pass over the blocks; overwrites extremes."""
    (bits, block_size), (payload, scales) = fmt, tile
    inverses = extremes
    key, column = uint32(0), 0
    if noise is not None:
        key, column = mix(uint32(noise[0] + uint32(place[0]))), noise[1] + place[1]
    for i in range(blocks):
        if noise is None:
            scale = choose_scale(extremes[i], bits, limit)
        else:
            scale = choose_unbiased_scale(extremes[i], bits, limit)
        scales[i * SCALE_BYTES] = uint8(to_bits(scale) >> uint32(16))
        scales[i * SCALE_BYTES + 1] = uint8(to_bits(scale) >> uint32(24))
        inverses[i] = float32(1.0) / scale
    for i in range(blocks):
        codes = pointer(payload, i * (block_size * bits // 8))
        if np.isnan(inverses[i]):
            for j in range(block_size * bits // 8):
                codes[j] = uint8(0 if bits == 8 else 0x88)
        else:
            begin = i * block_size
            encode_block(pointer(x, begin), inverses[i], fmt, noise, key, column + begin, codes)


@inlined
def encode_block(
    x: Pointer,
    inverse: float32,
    fmt: Format,
    noise: Noise | None,
    row_key: uint32,
    column: int,
    codes: Pointer,
) -> None:
    bits, half = fmt[0], fmt[1] // 2
    for i in range(0, half, LANES):
        low = times(load(pointer(x, i)), inverse)
        high = times(load(pointer(x, half + i)), inverse)
        if noise is not None:
            low, high = add_noise(low, high, row_key, column + i)
        if bits == 8:
            store_codes(low, pointer(codes, i))
            store_codes(high, pointer(codes, half + i))
        elif noise is None:
            store_nibbles(low, high, pointer(codes, i), 0)  # -8 at least, by the choice of the scale
        else:
            store_nibbles(low, high, pointer(codes, i), 1)


@inlined
def mix(x: uint32) -> uint32:
    """See [Note: Noise] in noise.py."""
    x = uint32(x ^ uint32(x >> _SHIFTS[0]))
    x = uint32(x * _MULTIPLIERS[0])
    x = uint32(x ^ uint32(x >> _SHIFTS[1]))
    x = uint32(x * _MULTIPLIERS[1])
    return uint32(x ^ uint32(x >> _SHIFTS[2]))


@inlined
def find_extreme(x: Pointer, count: int) -> float32:
    """The element of the largest magnitude, the negative one of two; NaN or Inf if there is any.

    Found among the bits: a maximum of floats would lose NaN. As integers with a sign the largest is that of
    the positive numbers, and without a sign that of the negative ones.
    """
    largest, smallest = signed_bits(x[0]), unsigned_bits(x[0])
    for i in range(count):
        largest = max(largest, signed_bits(x[i]))
        smallest = max(smallest, unsigned_bits(x[i]))
    high: float32 = widen(from_integer(largest, x[0]))
    low: float32 = widen(from_integer(smallest, x[0]))
    if uint32(to_bits(low) << uint32(1)) >= uint32(to_bits(high) << uint32(1)):
        return low
    return high


@inlined
def choose_scale(extreme: float32, bits: int, limit: float32) -> float32:
    """See [Note: Scales] in formats.py. `limit` is the largest number of the source's dtype."""
    if not np.isfinite(extreme):
        return _NAN_SCALE
    exact = abs(extreme) * float32(1.0 / 127) if bits == 8 else extreme * float32(-0.125)
    scale: float32 = widen(narrow(exact + float32(0), uint16(0)))  # of zeros: not -0.0
    if abs(scale) * float32(127 if bits == 8 else 8) > limit:
        scale = toward_zero(exact)
    if abs(scale) < float32(MIN_SCALE):
        scale = np.copysign(float32(MIN_SCALE), scale)
    return scale


@inlined
def choose_unbiased_scale(extreme: float32, bits: int, limit: float32) -> float32:
    """The same for stochastic rounding: positive, and rounded up."""
    if not np.isfinite(extreme):
        return _NAN_SCALE
    exact = abs(extreme) * float32(1.0 / 127 if bits == 8 else 1.0 / 7)
    scale = toward_zero(from_bits(uint32(to_bits(exact) + uint32(0xFFFF))))
    if scale * float32(127 if bits == 8 else 7) > limit:
        scale = toward_zero(exact)
    return max(scale, float32(MIN_SCALE))


@inlined
def toward_zero(value: float32) -> float32:
    """The next bf16 number in this direction."""
    return from_bits(to_bits(value) & uint32(0xFFFF0000))


@inlined
def sum_blocks(
    tile: Tile,
    senders: int,
    sender_stride: int,
    blocks: int,
    fmt: Format,
    gain: float32,
    accumulate: bool,
    sums: Pointer,
    out: Pointer,
) -> None:
    """out (+)= gain * the sum over senders, in their order; sums is for what is not the whole sum yet."""
    if senders == 1:
        add_blocks(tile, blocks, fmt, None, gain, accumulate, out)
        return
    add_blocks(tile, blocks, fmt, None, None, False, sums)
    for sender in range(1, senders):
        tile = pointer(tile[0], sender_stride), pointer(tile[1], sender_stride)
        if sender < senders - 1:
            add_blocks(tile, blocks, fmt, sums, None, False, sums)
        else:
            add_blocks(tile, blocks, fmt, sums, gain, accumulate, out)


@inlined
def add_blocks(
    tile: Tile,
    blocks: int,
    fmt: Format,
    sums: Pointer | None,
    gain: float32 | None,
    accumulate: bool,
    out: Pointer,
) -> None:
    """out (+)= gain * (sums + the blocks of one sender), without what is None."""
    (payload, scales), (bits, block_size) = tile, fmt
    half, block_bytes = block_size // 2, block_size * bits // 8
    by_table = bits == 4 and item_bytes(out) == 2 and HAS_LOOKUP and not accumulate
    # From some elements to the ones that are decoded with them, and from those to the next.
    gap, step = (LANES, 2 * LANES) if bits == 8 else (half, LANES)
    for block in range(blocks):
        codes, values = pointer(payload, block * block_bytes), pointer(out, block * block_size)
        scale = read_scale(pointer(scales, block * SCALE_BYTES))
        is_small = abs(scale) < _SMALL_SCALE
        for i in range(0, half * step // LANES, step):
            if sums is not None:
                prefetch_line(pointer(codes, i), PREFETCH_BYTES, 0)
            if sums is None and gain is not None and by_table:
                look_up_nibbles(pointer(codes, i), scale, gain, pointer(values, i), pointer(values, gap + i))
                continue
            if bits == 8:
                low, high = from_codes(pointer(codes, i)), from_codes(pointer(codes, gap + i))
            else:
                low, high = from_nibbles(pointer(codes, i), False), from_nibbles(pointer(codes, i), True)
            if sums is None:
                low, high = times(low, scale), times(high, scale)
            else:
                at = block * block_size + i
                sums_low, sums_high = load(pointer(sums, at)), load(pointer(sums, at + gap))
                if is_small:
                    low, high = times_plus(low, scale, sums_low), times_plus(high, scale, sums_high)
                else:
                    low, high = plus(times(low, scale), sums_low), plus(times(high, scale), sums_high)
            if gain is not None and gain != 1:
                low, high = times(low, gain), times(high, gain)
            if accumulate:
                low, high = plus(load(pointer(values, i)), low), plus(load(pointer(values, gap + i)), high)
            store(low, pointer(values, i))
            store(high, pointer(values, gap + i))


@inlined
def read_scale(place: Pointer) -> float32:
    low, high = uint32(place[0]), uint32(place[1])
    return from_bits(uint32(low << uint32(16)) | uint32(high << uint32(24)))


@inlined
def to_bits(value: float32) -> uint32:
    return float32(value).view(uint32)


@inlined
def from_bits(bits: uint32) -> float32:
    return uint32(bits).view(float32)


@inlined
def prefetch(values: Pointer, count: int, for_write: bool) -> None:
    """What comes some pages after these. Only a hint: addresses beyond the buffer are harmless."""
    for i in range(PREFETCH_BYTES, PREFETCH_BYTES + count * item_bytes(values), CACHE_LINE_BYTES):
        if for_write:
            prefetch_line(values, i, 1)
        else:
            prefetch_line(values, i, 0)
