"""Blocks, encoded and decoded: the parts that the kernels of cpu_kernels.py are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import float32, int8, int32, uint8, uint16, uint32
from numpy.typing import NDArray

from .cpu_intrinsics import inlined, narrow, pointer, prefetch_line, widen
from .formats import MIN_SCALE, NAN_SCALE_BITS, SCALE_BYTES
from .noise import MULTIPLIERS, SHIFTS

Array = NDArray[Any]
Pointer = Any  # to the first of several elements: indexed like an array, unchecked
Tile = tuple[Pointer, Pointer]  # payload and scales of some blocks of a row
Format = tuple[int, int]  # bits and block size
Noise = tuple[uint32, int]  # key of a call, and its offset; or key of a row, and the column

PREFETCH_BYTES = 8192
CACHE_LINE_BYTES = 64

_NAN_SCALE = uint32(NAN_SCALE_BITS << 16).view(float32)
# Adding 1.5 * 2^23 rounds a small float to an integer, to nearest even, and leaves it in the low bits.
_ROUNDER = float32(1.5 * 2**23)
_ROUNDER_BITS = int32(0x4B400000)
_SHIFTS, _MULTIPLIERS = tuple(map(uint32, SHIFTS)), tuple(map(uint32, MULTIPLIERS))


@inlined
def encode_blocks(
    x: Pointer,
    extremes: Pointer,
    blocks: int,
    fmt: Format,
    noise: Noise | None,
    limit: float32,
    tile: Tile,
) -> None:
    """The second and third pass over the blocks; overwrites extremes."""
    (bits, block_size), (payload, scales) = fmt, tile
    inverses = extremes
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
        elif noise is None:
            encode_block(pointer(x, i * block_size), inverses[i], fmt, codes)
        else:
            block_noise = noise[0], noise[1] + i * block_size
            encode_block_at_random(pointer(x, i * block_size), inverses[i], fmt, block_noise, codes)


@inlined
def encode_block(x: Pointer, inverse: float32, fmt: Format, codes: Pointer) -> None:
    bits, block_size = fmt
    if bits == 8:
        for i in range(block_size):
            codes[i] = uint8(to_code(widen(x[i]) * inverse, int32(127)))
    else:
        half = block_size // 2
        x_high = pointer(x, half)
        for i in range(half):
            low, high = to_nibble(widen(x[i]) * inverse), to_nibble(widen(x_high[i]) * inverse)
            codes[i] = uint8(low | int32(high << int32(4)))


@inlined
def to_code(steps: float32, largest: int32) -> int32:
    code = int32(int32(to_bits(steps + _ROUNDER)) - _ROUNDER_BITS)
    return int32(min(max(code, int32(-largest)), largest))


@inlined
def to_nibble(steps: float32) -> int32:
    """Code + 8, in the low four bits. The code is at least -8, by the choice of the scale."""
    rounded = int32(to_bits(steps + (_ROUNDER + float32(8))))
    return int32(min(rounded, int32(_ROUNDER_BITS + 15)))


@inlined
def encode_block_at_random(x: Pointer, inverse: float32, fmt: Format, noise: Noise, codes: Pointer) -> None:
    """See [Note: Noise] in noise.py."""
    (bits, block_size), (key, column) = fmt, noise
    half = block_size // 2
    x_high, codes_high = pointer(x, half), pointer(codes, half)
    if bits == 8:
        for i in range(half):
            random = mix(uint32(key ^ uint32(column + i)))
            low = x[i] * inverse + to_noise(uint32(random << uint32(16)))
            high = x_high[i] * inverse + to_noise(random)
            codes[i], codes_high[i] = uint8(to_code(low, int32(127))), uint8(to_code(high, int32(127)))
    else:
        for i in range(half):
            random = mix(uint32(key ^ uint32(column + i)))
            low = x[i] * inverse + to_noise(uint32(random << uint32(16)))
            high = x_high[i] * inverse + to_noise(random)
            low_nibble = int32(to_code(low, int32(7)) + int32(8))
            high_nibble = int32(to_code(high, int32(7)) + int32(8))
            codes[i] = uint8(low_nibble | int32(high_nibble << int32(4)))


@inlined
def to_noise(random: uint32) -> float32:
    """From the upper 16 bits."""
    return float32(int32(int32(int32(random) >> int32(16)) | int32(1))) * float32(2.0**-16)


@inlined
def mix(x: uint32) -> uint32:
    x = uint32(x ^ uint32(x >> _SHIFTS[0]))
    x = uint32(x * _MULTIPLIERS[0])
    x = uint32(x ^ uint32(x >> _SHIFTS[1]))
    x = uint32(x * _MULTIPLIERS[1])
    return uint32(x ^ uint32(x >> _SHIFTS[2]))


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


@inlined
def prefetch(values: Pointer, nbytes: int, for_write: bool) -> None:
    """Only a hint: addresses beyond the buffer are harmless."""
    for i in range(PREFETCH_BYTES, PREFETCH_BYTES + nbytes, CACHE_LINE_BYTES):
        if for_write:
            prefetch_line(values, i, 1)
        else:
            prefetch_line(values, i, 0)
