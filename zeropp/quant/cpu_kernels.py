"""The block formats compiled for the CPU by numba. Shapes, checks and threads are in cpu.py.

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
    test sees to it that a change to cpu_blocks.py or cpu_intrinsics.py changes this file, too.
"""

from __future__ import annotations

import numpy as np
from numpy import float32, uint32

from .cpu_blocks import (
    Array,
    Format,
    Noise,
    Pointer,
    Tile,
    decode_block,
    encode_blocks,
    find_extreme,
    mix,
    prefetch,
    sum_blocks,
)
from .cpu_intrinsics import inlined, kernel, narrow, pointer, rotate_group, widen
from .formats import SCALE_BYTES
from .rotation import GROUP

# Of both files; see [Note: Cache].
INLINED_SHA256 = "ba2374e1b92e86ca9578556546e6f25691d63e3159d95a7f76cc74138a24b40f"

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
        if noise is None and not rotate and count == tile_size:
            for i in range(tile_size // block_size):
                prefetch(pointer(x, i * block_size), block_size * source.itemsize, False)
                extremes[i] = find_extreme(pointer(x, i * block_size), block_size)
            encode_blocks(x, pointer(extremes, 0), tile_size // block_size, fmt, None, limit, tile)
        else:
            values = pointer(scratch, 0)
            whole = count // GROUP * GROUP if rotate else 0
            for start in range(0, whole, GROUP):
                prefetch(pointer(x, start), GROUP * source.itemsize, False)
                rotate_group(pointer(x, start), pointer(values, start), _FP32_MAX, False)
            prefetch(pointer(x, whole), (count - whole) * source.itemsize, False)
            for i in range(whole, count):
                values[i] = widen(x[i])
            if noise is None:
                encode_partial(values, count, pointer(extremes, 0), fmt, None, limit, tile)
            else:
                row_noise = mix(uint32(noise[0] + uint32(row))), noise[1] + begin
                encode_partial(values, count, pointer(extremes, 0), fmt, row_noise, limit, tile)


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
        values = pointer(out, order[row] * out_stride + begin)
        tile = find_tile(encoded, row * encoded_stride, numel, fmt, begin)
        if senders == 1 and factor == 1 and count == tile_size and not accumulate and not unrotate:
            for i in range(tile_size // block_size):
                prefetch(pointer(values, i * block_size), block_size * out.itemsize, True)
                decode_block(tile, i, fmt, pointer(values, i * block_size))
            continue
        sum_blocks(tile, senders, sender_stride, count, fmt, pointer(total, 0))
        gain = factor
        if unrotate:
            multiply(pointer(total, 0), count, factor)
            gain = float32(1)
            if not accumulate:
                prefetch(values, count * out.itemsize, True)
                unrotate_sums(pointer(total, 0), count, limit, values)
                continue
            unrotate_sums(pointer(total, 0), count, limit, pointer(total, 0))
        for start in range(0, count, block_size):
            sums, target = pointer(total, start), pointer(values, start)
            prefetch(target, block_size * out.itemsize, True)
            if accumulate:
                for i in range(min(block_size, count - start)):
                    target[i] = narrow(widen(target[i]) + sums[i] * gain, target[i])
            else:
                for i in range(min(block_size, count - start)):
                    target[i] = narrow(sums[i] * gain, target[i])


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
        sum_blocks(tile, senders, sender_stride, count, fmt, sums)
        multiply(sums, count, factor)
        if unrotate:
            unrotate_sums(sums, count, _FP32_MAX, sums)
        if rotate:
            for start in range(0, count - GROUP + 1, GROUP):
                rotate_group(pointer(sums, start), pointer(sums, start), _FP32_MAX, False)
        tile = find_tile(out, row * out_stride, numel, into, begin)
        if noise is None:
            encode_partial(sums, count, pointer(extremes, 0), into, None, _FP32_MAX, tile)
        else:
            row_noise = mix(uint32(noise[0] + uint32(row))), noise[1] + begin
            encode_partial(sums, count, pointer(extremes, 0), into, row_noise, _FP32_MAX, tile)


@inlined
def find_tile(encoded: Array, row_at: int, numel: int, fmt: Format, begin: int) -> Tile:
    """The blocks from element `begin` of a row on."""
    bits, block_size = fmt
    payload_bytes = -(-numel // block_size) * block_size * bits // 8
    scales = pointer(encoded, row_at + payload_bytes + begin // block_size * SCALE_BYTES)
    return pointer(encoded, row_at + begin * bits // 8), scales


@inlined
def multiply(sums: Pointer, count: int, factor: float32) -> None:
    if factor != 1:
        for i in range(count):
            sums[i] *= factor


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
    encode_blocks(x, extremes, blocks, fmt, noise, limit, tile)
