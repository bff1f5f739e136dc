"""Triton kernels of the block formats, for NVIDIA and AMD. launch.py launches them.
benchmarks/compile_gpu_kernels.py compiles them without a GPU.

One program handles a *tile*, 4096 consecutive elements of one row, whatever the block size:

    grid     (tiles of a row, rows)
    tile     [n, B]    n = 4096 / B blocks, so a tile starts at a block of every format
    inside   low [n, B/2], high [n, B/2]    lower and upper halves of the blocks

A block is loaded in halves because one int4 byte holds elements j and j + B/2 of its block. So they are
packed and unpacked without moving data between threads. int8 is as fast in halves, so there is one path.

[Note: Tile size]
A program has 128 threads (4 warps of NVIDIA, 2 of AMD), so a thread has 32 elements: one 128-bit load of
int4, two of int8, four of bf16, eight of fp32, all independent. With 8 programs on a multiprocessor (64
registers per thread allow it), 16 to 128 KB are in flight on each. Memory latency times bandwidth is about 18
KB. The reduction over a block of up to 1024 elements stays within a warp.

[Note: Bit parity]
The bytes equal those of reference.py because nothing here is left to the compiler:
    - Launches turn off the fusing of multiply and add (launch.LAUNCH). AMD's compiler still fuses a product
      with its rounding to fp16; from_float in bits.py keeps them apart.
    - 1/scale is an IEEE division, and scales are rounded to bf16 in integers.
    - x is rounded to an integer by adding 1.5 * 2^23: one fp32 addition, to nearest even, and the low bits of
      the sum are the integer. This is exact for |x| < 2^22, and codes are far below. It needs no conversion
      instruction (those run at a fraction of the rate) and no libdevice (which may flush subnormals).
    - Magnitudes are compared as integers: a float maximum drops NaN on some hardware.
One thing is left to the hardware: the bits of a decoded NaN. Encoded bytes have only the NaN 0x7fc0.
"""

# mypy: disable-error-code="untyped-decorator"
# (triton has no type hints, so everything that it decorates is untyped to mypy.)

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from .bits import (
    TILE,
    as_bits,
    as_float,
    from_float,
    high_int4_values,
    int8_values,
    low_int4_values,
    mix,
    scale_values,
    to_float,
    to_noise,
)
from .rotation import rotate

_SIGN = tl.constexpr(0x80000000)
_INFINITY = tl.constexpr(0x7F800000)
_NAN_SCALE = tl.constexpr(0x7FC00000)
_BF16_MASK = tl.constexpr(0xFFFF0000)
_MIN_SCALE = tl.constexpr(0x00800000)  # formats.MIN_SCALE, 2^-126
_SLOT_GROUP = tl.constexpr(8)  # scales in formats.ROW_ALIGNMENT bytes

_ROUND = tl.constexpr(0x4B400000)  # 1.5 * 2^23: adding it rounds to an integer, held in the low bits
_LARGEST_FP32 = tl.constexpr(3.4028234663852886e38)


# Unspecialized, because another seed or offset must not compile the kernel again.
@triton.jit(do_not_specialize=["seed_key", "offset"])
def encode_kernel(
    source: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    numel: tl.int64,
    source_stride: tl.int64,
    out_stride: tl.int64,
    seed_key: tl.int64,
    offset: tl.int64,
    bits: tl.constexpr,
    block_size: tl.constexpr,
    rotated: tl.constexpr,
    stochastic: tl.constexpr,
    largest: tl.constexpr,
) -> None:
    """out[k] = quantized source[order[k]]; `order` is a permutation on the device, or None."""
    half: tl.constexpr = block_size // 2
    tile, row = _position()
    source_row = row
    if order is not None:
        source_row = tl.load(order + row).to(tl.int64)
    element = _low_elements(block_size)
    left = _left_in_tile(numel, tile)
    at = source + source_row * source_stride + tile * TILE + element
    low = to_float(tl.load(at, mask=element < left, other=0.0))
    high = to_float(tl.load(at + half, mask=element + half < left, other=0.0))
    if rotated:
        low, high = rotate(low, high, element, left, block_size, _LARGEST_FP32, False)
    random = _random(seed_key, offset, block_size) if stochastic else None
    _store_blocks(low, high, random, out + row * out_stride, tile, numel, bits, block_size, largest)


@triton.jit
def decode_kernel(
    encoded: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    numel: tl.int64,
    sender_stride: tl.int64,
    encoded_stride: tl.int64,
    out_stride: tl.int64,
    factor: tl.float32,
    senders: tl.constexpr,
    bits: tl.constexpr,
    block_size: tl.constexpr,
    rotated: tl.constexpr,
    largest: tl.constexpr,
    accumulate: tl.constexpr,
) -> None:
    """out[order[k]] (+)= factor * (encoded[0][k] + encoded[1][k] + ...). Plain decoding is a sum of one."""
    half: tl.constexpr = block_size // 2
    tile, row = _position()
    low, high = _sum_senders(
        encoded + row * encoded_stride, sender_stride, tile, numel, senders, bits, block_size, block_size
    )
    low *= factor
    high *= factor
    element = _low_elements(block_size)
    left = _left_in_tile(numel, tile)
    if rotated:
        low, high = rotate(low, high, element, left, block_size, largest, True)
    out_row = row
    if order is not None:
        out_row = tl.load(order + row).to(tl.int64)
    at = out + out_row * out_stride + tile * TILE + element
    if accumulate:
        low += to_float(tl.load(at, mask=element < left, other=0.0))
        high += to_float(tl.load(at + half, mask=element + half < left, other=0.0))
    tl.store(at, from_float(low, out.dtype.element_ty), mask=element < left)
    tl.store(at + half, from_float(high, out.dtype.element_ty), mask=element + half < left)


@triton.jit(do_not_specialize=["seed_key", "offset"])
def recode_kernel(
    encoded: tl.tensor,
    out: tl.tensor,
    numel: tl.int64,
    sender_stride: tl.int64,
    encoded_stride: tl.int64,
    out_stride: tl.int64,
    factor: tl.float32,
    seed_key: tl.int64,
    offset: tl.int64,
    senders: tl.constexpr,
    bits: tl.constexpr,
    block_size: tl.constexpr,
    into_bits: tl.constexpr,
    into_block_size: tl.constexpr,
    rotation: tl.constexpr,
    stochastic: tl.constexpr,
) -> None:
    """out[k] = quantized factor * (encoded[0][k] + encoded[1][k] + ...): one pass, sums stay in registers.

    rotation: 1 to rotate the sums, -1 to turn them back, else 0.
    """
    tile, row = _position()
    low, high = _sum_senders(
        encoded + row * encoded_stride, sender_stride, tile, numel, senders, bits, block_size, into_block_size
    )
    # A new block has zeros past the end of the row. The old block may decode to NaN there, if it is longer
    # than the new one.
    element = _low_elements(into_block_size)
    left = _left_in_tile(numel, tile)
    low = tl.where(element < left, low * factor, 0.0)
    high = tl.where(element + into_block_size // 2 < left, high * factor, 0.0)
    if rotation != 0:
        low, high = rotate(low, high, element, left, into_block_size, _LARGEST_FP32, rotation < 0)
    random = _random(seed_key, offset, into_block_size) if stochastic else None
    _store_blocks(
        low, high, random, out + row * out_stride, tile, numel, into_bits, into_block_size, _LARGEST_FP32
    )


# The position of a program. Offsets inside a tile have 32 bits, the start of a tile has 64.


@triton.jit
def _position() -> tuple[tl.tensor, tl.tensor]:
    return tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)


@triton.jit
def _low_elements(block_size: tl.constexpr) -> tl.tensor:
    """Positions in the tile of the lower halves' elements, [n, B/2]; the upper halves are B/2 further."""
    block = tl.arange(0, TILE // block_size)
    return block[:, None] * block_size + tl.arange(0, block_size // 2)[None, :]


@triton.jit
def _left_in_tile(count: tl.tensor, tile: tl.tensor, per_tile: tl.constexpr = TILE) -> tl.tensor:
    """How many of a row's `count` elements or blocks are in this tile or after it, up to a full tile."""
    return tl.minimum(count - tile * per_tile, per_tile).to(tl.int32)


# Encoding.


@triton.jit
def _random(seed_key: tl.tensor, offset: tl.tensor, block_size: tl.constexpr) -> tl.tensor:
    """32 bits for each pair of elements, [n, B/2]; see [Note: Noise] in noise.py."""
    tile, row = _position()
    key = mix((seed_key + row).to(tl.uint32))
    start = (offset + tile * TILE).to(tl.uint32)
    return mix(key ^ (start + _low_elements(block_size).to(tl.uint32)))


@triton.jit
def _store_blocks(
    low: tl.tensor,
    high: tl.tensor,
    random: tl.tensor,
    row_start: tl.tensor,
    tile: tl.tensor,
    numel: tl.tensor,
    bits: tl.constexpr,
    block_size: tl.constexpr,
    largest: tl.constexpr,
) -> None:
    """Quantize the blocks of a tile and write their payload and scales. `random` may be None."""
    half: tl.constexpr = block_size // 2
    payload_block: tl.constexpr = block_size * bits // 8
    per_tile: tl.constexpr = TILE // block_size
    block = tl.arange(0, per_tile)
    blocks = tl.cdiv(numel, block_size)
    is_block = block < _left_in_tile(blocks, tile, per_tile)

    scale = _block_scales(low, high, bits, random is not None, largest)
    if random is None:
        low_code = _codes(low, scale, None, bits)
        high_code = _codes(high, scale, None, bits)
    else:
        low_code = _codes(low, scale, to_noise(random << 16), bits)
        high_code = _codes(high, scale, to_noise(random), bits)
    at = row_start + tile * (TILE * bits // 8) + block[:, None] * payload_block + tl.arange(0, half)[None, :]
    if bits == 8:
        tl.store(at, low_code.to(tl.uint8), mask=is_block[:, None])
        tl.store(at + half, high_code.to(tl.uint8), mask=is_block[:, None])
    else:
        tl.store(at, (low_code | high_code << 4).to(tl.uint8), mask=is_block[:, None])

    # The zeros at the end of a row have the width of up to 7 scales. They are written as the scales of blocks
    # that do not exist. launch.py launches enough programs for these, too.
    slots_left = _left_in_tile(tl.cdiv(blocks, _SLOT_GROUP) * _SLOT_GROUP, tile, per_tile)
    slots = (row_start + blocks * payload_block).to(tl.pointer_type(tl.uint16))
    tl.store(
        slots + tile * per_tile + block,
        tl.where(is_block, scale >> 16, 0).to(tl.uint16),
        mask=block < slots_left,
    )


@triton.jit
def _block_scales(
    low: tl.tensor,
    high: tl.tensor,
    bits: tl.constexpr,
    stochastic: tl.constexpr,
    largest: tl.constexpr,
) -> tl.tensor:
    """The scale of each block as the bits of an fp32, [n]; see [Note: Scales] in formats.py."""
    exact = as_bits(_extremes(low, high, bits, stochastic))
    sign = exact & _SIGN
    exact ^= sign
    sign = tl.where(exact == 0, 0, sign)  # of zeros: never -0.0
    # Up, or to nearest even.
    rounded = (exact + 0xFFFF if stochastic else exact + 0x7FFF + (exact >> 16 & 1)) & _BF16_MASK
    max_magnitude: tl.constexpr = 127.0 if bits == 8 else (7.0 if stochastic else 8.0)
    overflows = as_float(rounded) * max_magnitude > largest
    scale = tl.maximum(tl.where(overflows, exact & _BF16_MASK, rounded), _MIN_SCALE)
    return tl.where(exact < _INFINITY, sign | scale, _NAN_SCALE)


@triton.jit
def _extremes(low: tl.tensor, high: tl.tensor, bits: tl.constexpr, stochastic: tl.constexpr) -> tl.tensor:
    """The exact scale of each block: NaN or Inf if the block holds one."""
    if bits == 8 or stochastic:
        magnitude = tl.maximum(as_bits(low) & 0x7FFFFFFF, as_bits(high) & 0x7FFFFFFF)
        return as_float(tl.max(magnitude, axis=1)) * (1.0 / 127 if bits == 8 else 1.0 / 7)
    # With the bits rotated by one, the sign is the lowest bit: the largest integer is the largest magnitude,
    # and of +m and -m it is -m.
    low_key = as_bits(low) << 1 | as_bits(low) >> 31
    high_key = as_bits(high) << 1 | as_bits(high) >> 31
    key = tl.max(tl.maximum(low_key, high_key), axis=1)
    return as_float(key >> 1 | key << 31) * -0.125


@triton.jit
def _codes(x: tl.tensor, scale: tl.tensor, noise: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """The payload of x, [n, B/2] uint32: the low 8 bits are an int8 code, the low 4 an int4 code + 8."""
    zero: tl.constexpr = _ROUND if bits == 8 else _ROUND + 8
    max_code: tl.constexpr = 127 if bits == 8 else 7
    # In a NaN block all codes are 0: numbers are multiplied by 0, and the bits of NaN, a large integer, are
    # cut.
    is_number = scale != _NAN_SCALE
    inverse = tl.where(is_number, tl.math.div_rn(1.0, as_float(scale)), 0.0)
    greatest = tl.where(is_number, zero + max_code, zero).to(tl.uint32)
    steps = x * inverse[:, None]
    if noise is not None:
        steps += tl.where(is_number[:, None], noise, 0.0)
    code = as_bits(steps + (12582912.0 if bits == 8 else 12582912.0 + 8))
    # A scale rounded toward zero gives -127.99 steps or more; of int4, -8.07, which are -8 without noise.
    if bits == 8 or noise is not None:
        code = tl.maximum(code, zero - max_code)
    return tl.minimum(code, greatest[:, None])


# Decoding.


@triton.jit
def _sum_senders(
    row_start: tl.tensor,
    sender_stride: tl.tensor,
    tile: tl.tensor,
    numel: tl.tensor,
    senders: tl.constexpr,
    bits: tl.constexpr,
    block_size: tl.constexpr,
    into_block_size: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The sum of all senders' values of a tile, as halves of blocks of `into_block_size`."""
    # Adding -0.0 changes no number, and adding 0.0 would change -0.0. The sum starts from bits, because
    # Triton's full() turns -0.0 into 0.0.
    low = as_float(tl.full([TILE // into_block_size, into_block_size // 2], _SIGN, tl.uint32))
    high = low
    for sender in tl.range(0, senders, loop_unroll_factor=4):
        start = row_start + sender * sender_stride
        if block_size == into_block_size:
            low, high = _add_sender(low, high, start, tile, numel, bits, block_size)
        else:
            element = _low_elements(into_block_size)
            low = _add_elements(low, element, start, tile, numel, bits, block_size)
            high = _add_elements(high, element + into_block_size // 2, start, tile, numel, bits, block_size)
    return low, high


@triton.jit
def _add_sender(
    low: tl.tensor,
    high: tl.tensor,
    row_start: tl.tensor,
    tile: tl.tensor,
    numel: tl.tensor,
    bits: tl.constexpr,
    block_size: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Add one sender's values to the halves."""
    half: tl.constexpr = block_size // 2
    payload_block: tl.constexpr = block_size * bits // 8
    per_tile: tl.constexpr = TILE // block_size
    block = tl.arange(0, per_tile)
    blocks = tl.cdiv(numel, block_size)
    is_block = block < _left_in_tile(blocks, tile, per_tile)

    at = row_start + tile * (TILE * bits // 8) + block[:, None] * payload_block + tl.arange(0, half)[None, :]
    slots = (row_start + blocks * payload_block).to(tl.pointer_type(tl.uint16))
    scale = scale_values(tl.load(slots + tile * per_tile + block, mask=is_block, other=0))[:, None]
    byte = tl.load(at, mask=is_block[:, None], other=0)
    if bits == 8:
        high_byte = tl.load(at + half, mask=is_block[:, None], other=0)
        return low + int8_values(byte) * scale, high + int8_values(high_byte) * scale
    return low + low_int4_values(byte) * scale, high + high_int4_values(byte) * scale


@triton.jit
def _add_elements(
    total: tl.tensor,
    element: tl.tensor,
    row_start: tl.tensor,
    tile: tl.tensor,
    numel: tl.tensor,
    bits: tl.constexpr,
    block_size: tl.constexpr,
) -> tl.tensor:
    """Add values of any elements of the tile, each with its own byte and scale: for unequal block sizes."""
    in_row = element < _left_in_tile(numel, tile)
    block = element // block_size
    if bits == 8:
        code = int8_values(tl.load(row_start + tile * TILE + element, mask=in_row, other=0))
    else:
        half: tl.constexpr = block_size // 2
        at = row_start + tile * (TILE // 2) + block * half + element % half
        byte = tl.load(at, mask=in_row, other=0)
        code = tl.where(element % block_size < half, low_int4_values(byte), high_int4_values(byte))
    payload_bytes = tl.cdiv(numel, block_size) * (block_size * bits // 8)
    slots = (row_start + payload_bytes).to(tl.pointer_type(tl.uint16))
    scale = tl.load(slots + tile * (TILE // block_size) + block, mask=in_row, other=0)
    return total + code * scale_values(scale)
