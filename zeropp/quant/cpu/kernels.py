"""The block formats compiled for the CPU by numba. Checks, shapes and threads are in launch.py.

A kernel works on a range of *tiles* of some blocks each, so that threads can share a call. Tile t of row r is
number r * tiles + t. Buffers are flat, with the starts of their rows, so every view and every order works. If
a row does not fill its last tile, the kernel works on that tile in scratch memory, where blocks are whole.

[Note: Speed]
    - Blocks are pointers: slices are reference counted, and their indices are checked for being negative.
    - Integers are cast after every operation, since numba widens each result to 64 bits.
    - Lines are prefetched some pages ahead: the hardware stops at the end of each page, and does not fetch
      lines that are only written. Without it, encode and decode take 1.3 to 1.6 times as long.
    - A tile is encoded in three passes over its blocks, so that no block waits for its own scale.
    - `noise` is None for formats that round to nearest. numba compiles these kernels without noise.

[Note: Cache]
    numba compiles a kernel again when the file that defines it has changed, and ignores the files that it
    imports. A test therefore requires that a change to simd.py changes this file, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import float32, uint8, uint32
from numpy.typing import NDArray

from ..formats import MIN_SCALE, NAN_SCALE_BITS, SCALE_BYTES
from ..rotation import GROUP
from .cache import inlined, kernel
from .simd import (
    HAS_LOOKUP,
    LANES,
    add_noise,
    bits_of,
    cut,
    from_bits_like,
    from_codes,
    from_nibbles,
    item_bytes,
    load,
    look_up_nibbles,
    plus,
    pointer,
    prefetch_line,
    rotate_group,
    store,
    store_codes,
    store_nibbles,
    times,
    times_plus,
)

# Of simd.py; see [Note: Cache].
INLINED_SHA256 = "1ad20148484063eee12c28bcafa9417d52d5a3dea6c16cba2b9b0fa861eb0ac3"

Array = NDArray[Any]
Pointer = Any  # to the first of several elements: indexed like an array, unchecked
Rows = tuple[Array, Array]  # memory, and where each row starts in it
Senders = tuple[int, int]  # how many have sent the same rows, and the distance from one to the next
Format = tuple[int, int, bool]  # bits, block size, and whether it rotates
Noise = tuple[uint32, int]  # key of a call, and its offset; see [Note: Noise] in noise.py
Work = tuple[int, int, int, int]  # elements of a row, elements of a tile, the first tile and the end
Place = tuple[int, int]  # row, and the first element of it
Tile = tuple[Pointer, Pointer, int]  # payload and scales of some blocks of a row, and how many

PREFETCH_BYTES = 8192
CACHE_LINE_BYTES = 64

_FP32_MAX = float32(np.finfo(np.float32).max)
_NAN_SCALE = uint32(NAN_SCALE_BITS << 16).view(float32)
# A code times a smaller scale cannot overflow, and is exact: a fused multiply-add changes no bit.
_SMALL_SCALE = float32(2.0**120)


@kernel
def encode_range(
    source: Rows, out: Rows, fmt: Format, noise: Noise | None, limit: float32, work: Work
) -> None:
    (_, block_size, is_rotated), (numel, tile_size, first, last) = fmt, work
    tiles = -(-numel // tile_size)
    partial, scratch = np.empty(tile_size, source[0].dtype), np.empty(tile_size, float32)
    extremes = np.empty(tile_size // block_size, float32)
    for index in range(first, last):
        row, begin = index // tiles, index % tiles * tile_size
        count = min(tile_size, numel - begin)
        tile, best = find_tile(out, row, fmt, numel, begin, count), pointer(extremes, 0)
        blocks = tile[2]
        x = pointer(source[0], source[1][row] + begin)
        if count == tile_size and not is_rotated:
            find_extremes(x, True, blocks, block_size, best)
            encode_blocks(x, best, fmt, noise, (row, begin), limit, tile)
            continue
        if count < tile_size:
            copy(x, count, pointer(partial, 0))
            x = pointer(partial, 0)
            pad(x, count, blocks * block_size)
        values = pointer(scratch, 0)
        rotate(x, count if is_rotated else 0, blocks * block_size, values)
        find_extremes(values, False, blocks, block_size, best)
        encode_blocks(values, best, fmt, noise, (row, begin), limit, tile)


@kernel
def decode_range(
    encoded: Rows,
    senders: Senders,
    out: Rows,
    fmt: Format,
    limit: float32,
    factor: float32,
    accumulate: bool,
    work: Work,
) -> None:
    (_, _, is_rotated), (numel, tile_size, first, last) = fmt, work
    tiles = -(-numel // tile_size)
    partial, total = np.empty(tile_size, out[0].dtype), np.empty(tile_size, float32)
    for index in range(first, last):
        row, begin = index // tiles, index % tiles * tile_size
        count = min(tile_size, numel - begin)
        in_row = pointer(out[0], out[1][row] + begin)
        prefetch(in_row, count, True)
        sums = pointer(total, 0)
        tile = find_tile(encoded, row, fmt, numel, begin, count)
        if count == tile_size and not is_rotated:
            sum_blocks(tile, senders, fmt, factor, accumulate, sums, in_row)
            continue
        sum_blocks(tile, senders, fmt, factor, False, sums, sums)
        values = in_row
        if count < tile_size:
            values = pointer(partial, 0)
            if accumulate:
                copy(in_row, count, values)
        if is_rotated and not accumulate:
            unrotate(sums, count, limit, values)
        else:
            if is_rotated:
                unrotate(sums, count, limit, sums)
            for i in range(0, count, LANES):
                added = load(pointer(sums, i))
                if accumulate:
                    added = plus(load(pointer(values, i)), added)
                store(added, pointer(values, i))
        if count < tile_size:
            copy(values, count, in_row)


@kernel
def recode_range(
    encoded: Rows,
    senders: Senders,
    fmt: Format,
    out: Rows,
    into: Format,
    noise: Noise | None,
    factor: float32,
    work: Work,
) -> None:
    (_, block_size, is_rotated), (numel, tile_size, first, last) = into, work
    tiles = -(-numel // tile_size)
    total = np.empty(tile_size, float32)
    extremes = np.empty(tile_size // block_size, float32)
    for index in range(first, last):
        row, begin = index // tiles, index % tiles * tile_size
        count = min(tile_size, numel - begin)
        sums, best = pointer(total, 0), pointer(extremes, 0)
        tile = find_tile(encoded, row, fmt, numel, begin, count)
        sum_blocks(tile, senders, fmt, factor, False, sums, sums)
        if fmt[2] and not is_rotated:
            unrotate(sums, count, _FP32_MAX, sums)
        tile = find_tile(out, row, into, numel, begin, count)
        # A new block has zeros past the end of the row, whatever the old block decodes to there.
        pad(sums, count, tile[2] * block_size)
        if is_rotated and not fmt[2]:
            rotate(sums, count, count, sums)
        find_extremes(sums, False, tile[2], block_size, best)
        encode_blocks(sums, best, into, noise, (row, begin), _FP32_MAX, tile)


@inlined
def find_tile(encoded: Rows, row: int, fmt: Format, numel: int, begin: int, count: int) -> Tile:
    """The blocks of `count` elements of a row, from `begin` on."""
    bits, block_size, _ = fmt
    memory, row_at = encoded[0], encoded[1][row]
    payload_bytes = -(-numel // block_size) * block_size * bits // 8
    scales = pointer(memory, row_at + payload_bytes + begin // block_size * SCALE_BYTES)
    return pointer(memory, row_at + begin * bits // 8), scales, -(-count // block_size)


@inlined
def copy(source: Pointer, count: int, out: Pointer) -> None:
    for i in range(count):
        out[i] = source[i]


@inlined
def pad(x: Pointer, count: int, size: int) -> None:
    for i in range(count, size):
        x[i] = 0


@inlined
def rotate(x: Pointer, count: int, size: int, out: Pointer) -> None:
    """Rotate the whole groups of `count` elements, and copy the rest of `size` elements."""
    whole = count // GROUP * GROUP
    for i in range(0, whole, GROUP):
        prefetch(pointer(x, i), GROUP, False)
        rotate_group(pointer(x, i), pointer(out, i), _FP32_MAX, False)
    for i in range(whole, size, LANES):
        store(load(pointer(x, i)), pointer(out, i))


@inlined
def unrotate(sums: Pointer, count: int, limit: float32, out: Pointer) -> None:
    whole = count // GROUP * GROUP
    for i in range(0, whole, GROUP):
        rotate_group(pointer(sums, i), pointer(out, i), limit, True)
    for i in range(whole, count, LANES):
        store(cut(load(pointer(sums, i)), limit), pointer(out, i))


# Encoding.


@inlined
def find_extremes(x: Pointer, prefetches: bool, blocks: int, block_size: int, extremes: Pointer) -> None:
    """The first pass: the element of the largest magnitude of each block, the negative one of two; NaN or Inf
    if there is any.

    Found among the bits: a maximum of floats would lose NaN. As integers with a sign the largest is that of
    the positive numbers, and without a sign that of the negative ones.
    """
    for block in range(blocks):
        values = pointer(x, block * block_size)
        if prefetches:
            prefetch(values, block_size, False)
        largest, smallest = bits_of(values[0], True), bits_of(values[0], False)
        for i in range(block_size):
            largest = max(largest, bits_of(values[i], True))
            smallest = max(smallest, bits_of(values[i], False))
        high, low = from_bits_like(largest, values), from_bits_like(smallest, values)
        is_low = uint32(to_bits(low) << uint32(1)) >= uint32(to_bits(high) << uint32(1))
        extremes[block] = low if is_low else high


@inlined
def encode_blocks(
    x: Pointer, extremes: Pointer, fmt: Format, noise: Noise | None, place: Place, limit: float32, tile: Tile
) -> None:
    """The second and third pass over the blocks; overwrites extremes."""
    (bits, block_size, _), (payload, scales, blocks) = fmt, tile
    half, block_bytes = block_size // 2, block_size * bits // 8
    inverses = extremes
    key, column = uint32(0), 0
    if noise is not None:
        key, column = uint32(noise[0] + uint32(place[0])), noise[1] + place[1]
    for block in range(blocks):
        scale = choose_scale(extremes[block], bits, noise, limit)
        scales[block * SCALE_BYTES] = uint8(to_bits(scale) >> uint32(16))
        scales[block * SCALE_BYTES + 1] = uint8(to_bits(scale) >> uint32(24))
        inverses[block] = float32(1.0) / scale
    for block in range(blocks):
        codes, values = pointer(payload, block * block_bytes), pointer(x, block * block_size)
        inverse = inverses[block]
        if np.isnan(inverse):
            for i in range(block_bytes):
                codes[i] = uint8(0 if bits == 8 else 0x88)
            continue
        for i in range(0, half, LANES):
            low = times(load(pointer(values, i)), inverse)
            high = times(load(pointer(values, half + i)), inverse)
            if noise is not None:
                low, high = add_noise(low, high, key, column + block * block_size + i)
            if bits == 8:
                store_codes(low, pointer(codes, i))
                store_codes(high, pointer(codes, half + i))
            elif noise is None:
                store_nibbles(low, high, pointer(codes, i), 0)  # -8 at least, by the choice of the scale
            else:
                store_nibbles(low, high, pointer(codes, i), 1)


@inlined
def choose_scale(extreme: float32, bits: int, noise: Noise | None, limit: float32) -> float32:
    """See [Note: Scales] in formats.py. `limit` is the largest number of the source's dtype."""
    if not np.isfinite(extreme):
        return _NAN_SCALE
    if bits == 8:
        exact, largest_code = abs(extreme) * float32(1.0 / 127), float32(127)
    elif noise is None:
        exact, largest_code = extreme * float32(-0.125) + float32(0), float32(8)  # of zeros: not -0.0
    else:
        exact, largest_code = abs(extreme) * float32(1.0 / 7), float32(7)
    if noise is None:  # to nearest even
        increment = uint32(uint32(0x7FFF) + uint32(uint32(to_bits(exact) >> uint32(16)) & uint32(1)))
    else:  # up
        increment = uint32(0xFFFF)
    scale = toward_zero(from_bits(uint32(to_bits(exact) + increment)))
    if abs(scale) * largest_code > limit:
        scale = toward_zero(exact)
    if abs(scale) < float32(MIN_SCALE):
        scale = np.copysign(float32(MIN_SCALE), scale)
    return scale


# Decoding.


@inlined
def sum_blocks(
    tile: Tile, senders: Senders, fmt: Format, gain: float32, accumulate: bool, sums: Pointer, out: Pointer
) -> None:
    """out (+)= gain * the sum over senders, in their order; `sums` holds what is not the whole sum yet."""
    if senders[0] == 1:
        add_blocks(tile, fmt, None, gain, accumulate, out)
        return
    add_blocks(tile, fmt, None, None, False, sums)
    for sender in range(1, senders[0]):
        tile = pointer(tile[0], senders[1]), pointer(tile[1], senders[1]), tile[2]
        if sender < senders[0] - 1:
            add_blocks(tile, fmt, sums, None, False, sums)
        else:
            add_blocks(tile, fmt, sums, gain, accumulate, out)


@inlined
def add_blocks(
    tile: Tile, fmt: Format, sums: Pointer | None, gain: float32 | None, accumulate: bool, out: Pointer
) -> None:
    """out (+)= gain * (sums + the blocks of one sender), without what is None."""
    (payload, scales, blocks), (bits, block_size, _) = tile, fmt
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
def toward_zero(value: float32) -> float32:
    """The next bf16 number in this direction."""
    return from_bits(to_bits(value) & uint32(0xFFFF0000))


@inlined
def to_bits(value: float32) -> uint32:
    return float32(value).view(uint32)


@inlined
def from_bits(bits: uint32) -> float32:
    return uint32(bits).view(float32)


@inlined
def prefetch(values: Pointer, count: int, for_write: bool) -> None:
    """Prefetch the memory some pages after these. Only a hint: addresses beyond the buffer are harmless."""
    for i in range(PREFETCH_BYTES, PREFETCH_BYTES + count * item_bytes(values), CACHE_LINE_BYTES):
        if for_write:
            prefetch_line(values, i, 1)
        else:
            prefetch_line(values, i, 0)
