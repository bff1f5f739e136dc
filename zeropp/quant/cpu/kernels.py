"""The block formats compiled for the CPU by numba. Shapes, checks and threads are in launch.py.

A kernel works on a range of *tiles*, some blocks each, so that threads can share a call; tile t of row r is
number r * tiles + t. Buffers are flat, with the distance between rows beside them, to serve every view.

[Note: Speed]
    - Blocks are pointers: slices are reference counted, and their indices checked for being negative.
    - Integers are cast after every operation, since numba widens each result to 64 bits.
    - Lines are prefetched some pages ahead: the hardware stops at the end of each page, and does not fetch
      lines that are only written. Encode and decode would take 1.3 to 1.6 times as long.
    - A tile is encoded in three passes over its blocks, so that no block waits for its own scale.
    - `noise` is None where there is none. numba knows it when it compiles: plain kernels do not pay for it.

[Note: Cache]
    numba compiles a kernel again when the file that it is in has changed, and looks at no other file. So a
    test sees to it that a change to blocks.py, intrinsics.py or simd.py changes this file, too.
"""

from __future__ import annotations

import numpy as np
from numpy import float32

from ..formats import SCALE_BYTES
from ..rotation import GROUP
from .blocks import (
    Array,
    Format,
    Noise,
    Place,
    Pointer,
    Tile,
    encode_blocks,
    find_extreme,
    prefetch,
    sum_blocks,
)
from .cache import kernel
from .intrinsics import inlined, narrow, pointer, rotate_group, widen

# Of these files; see [Note: Cache].
INLINED_SHA256 = "2e617615ba8454321f185e139e7852d0b3972824bea1abca1b0a81674cb432c4"

_FP32_MAX = float32(np.finfo(np.float32).max)


@kernel
def encode_range(
    source: Array,
    source_stride: int,
    order: Array,
    out: Array,
    out_stride: int,
    numel: int,
    fmt: Format,
    rotate: bool,
    noise: Noise | None,
    tile_size: int,
    limit: float32,
    first: int,
    last: int,
) -> None:
    block_size = fmt[1]
    tiles = -(-numel // tile_size)
    scratch = np.empty(tile_size, float32)
    extremes = np.empty(tile_size // block_size, float32)
    for index in range(first, last):
        row, begin = index // tiles, index % tiles * tile_size
        count = min(tile_size, numel - begin)
        x = pointer(source, order[row] * source_stride + begin)
        tile = find_tile(out, row * out_stride, numel, fmt, begin)
        if not rotate and count == tile_size:
            for i in range(tile_size // block_size):
                prefetch(pointer(x, i * block_size), block_size, False)
                extremes[i] = find_extreme(pointer(x, i * block_size), block_size)
            encode_blocks(
                x, pointer(extremes, 0), tile_size // block_size, fmt, noise, (row, begin), limit, tile
            )
        else:
            values = pointer(scratch, 0)
            whole = count // GROUP * GROUP if rotate else 0
            for start in range(0, whole, GROUP):
                prefetch(pointer(x, start), GROUP, False)
                rotate_group(pointer(x, start), pointer(values, start), _FP32_MAX, False)
            prefetch(pointer(x, whole), count - whole, False)
            for i in range(whole, count):
                values[i] = widen(x[i])
            encode_partial(values, count, pointer(extremes, 0), fmt, noise, (row, begin), limit, tile)


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
    unrotate: bool,
    tile_size: int,
    limit: float32,
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
        blocks = -(-count // block_size)
        values = pointer(out, order[row] * out_stride + begin)
        tile = find_tile(encoded, row * encoded_stride, numel, fmt, begin)
        sums = pointer(total, 0)
        prefetch(values, count, True)
        if count == tile_size and not unrotate:
            sum_blocks(tile, senders, sender_stride, blocks, fmt, factor, accumulate, sums, values)
            continue
        sum_blocks(tile, senders, sender_stride, blocks, fmt, factor, False, sums, sums)
        if unrotate and not accumulate:
            unrotate_sums(sums, count, limit, values)
            continue
        if unrotate:
            unrotate_sums(sums, count, limit, sums)
        for i in range(count):
            values[i] = narrow(widen(values[i]) + sums[i] if accumulate else sums[i], values[i])


@kernel
def recode_range(
    encoded: Array,
    senders: int,
    strides: tuple[int, int],
    fmt: Format,
    out: Array,
    out_stride: int,
    into: Format,
    unrotate: bool,
    rotate: bool,
    noise: Noise | None,
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
        blocks = -(-count // fmt[1])
        sum_blocks(tile, senders, sender_stride, blocks, fmt, factor, False, sums, sums)
        if unrotate:
            unrotate_sums(sums, count, _FP32_MAX, sums)
        if rotate:
            for start in range(0, count - GROUP + 1, GROUP):
                rotate_group(pointer(sums, start), pointer(sums, start), _FP32_MAX, False)
        tile = find_tile(out, row * out_stride, numel, into, begin)
        encode_partial(sums, count, pointer(extremes, 0), into, noise, (row, begin), _FP32_MAX, tile)


@inlined
def find_tile(encoded: Array, row_at: int, numel: int, fmt: Format, begin: int) -> Tile:
    """The blocks from element `begin` of a row on."""
    bits, block_size = fmt
    payload_bytes = -(-numel // block_size) * block_size * bits // 8
    scales = pointer(encoded, row_at + payload_bytes + begin // block_size * SCALE_BYTES)
    return pointer(encoded, row_at + begin * bits // 8), scales


@inlined
def unrotate_sums(sums: Pointer, count: int, limit: float32, out: Pointer) -> None:
    whole = count // GROUP * GROUP
    for start in range(0, whole, GROUP):
        rotate_group(pointer(sums, start), pointer(out, start), limit, True)
    for i in range(whole, count):
        cut = min(max(sums[i], -limit), limit) + (sums[i] - sums[i])  # NaN, if it is not finite
        out[i] = narrow(cut, out[i])


@inlined
def encode_partial(
    x: Pointer,
    count: int,
    extremes: Pointer,
    fmt: Format,
    noise: Noise | None,
    place: Place,
    limit: float32,
    tile: Tile,
) -> None:
    """A tile in scratch memory, of which only `count` elements are there."""
    block_size = fmt[1]
    blocks = -(-count // block_size)
    for i in range(count, blocks * block_size):
        x[i] = float32(0)
    for i in range(blocks):
        extremes[i] = find_extreme(pointer(x, i * block_size), block_size)
    encode_blocks(x, extremes, blocks, fmt, noise, place, limit, tile)
