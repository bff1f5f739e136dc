"""Triton kernels of the block formats, for NVIDIA and AMD. gpu.py launches them, aot.py compiles them.

One program handles a *tile*, 4096 consecutive elements of one row, whatever the block size:

    grid     (tiles of a row, rows)
    tile     [n, B]    n = 4096 / B blocks, so a tile starts at a block of every format
    inside   low [n, B/2], high [n, B/2]    lower and upper halves of the blocks

Halves, because one int4 byte holds element j and element j + B/2 of its block: loaded apart, they are packed
and unpacked without moving data between threads. int8 does as well with them, so there is one path.

[Note: Tile size]
A program has 128 threads (4 warps of NVIDIA, 2 of AMD), so a tile is 32 elements a thread: 16 bytes of int4,
one 128-bit load; two of int8, four of bf16, eight of fp32, all independent. With 8 programs on a
multiprocessor (64 registers a thread allow it) 16 to 128 KB are in flight on each; memory latency times
bandwidth asks for about 18 KB. The reduction over a block of up to 1024 elements stays within a warp.

[Note: Bit parity]
The bytes equal those of reference.py because nothing here is left to the compiler:
    - launches turn off the fusing of multiply and add (gpu.LAUNCH).
    - 1/scale is an IEEE division, and scales are rounded to bf16 in integers.
    - x is rounded to an integer by adding 1.5 * 2^23: one fp32 addition, to nearest even, and the low bits of
      the sum are the integer. Exact for |x| < 2^22, and codes are far below. No conversion instruction (those
      run at a fraction of the rate), no libdevice (which may flush subnormals).
    - magnitudes are compared as integers: a float maximum drops NaN, or not, depending on the hardware.
One thing is left to the hardware: which NaN a decoded NaN is. Encoded bytes hold only 0x7fc0.
"""

# mypy: disable-error-code="untyped-decorator"
# (triton has no type hints: under mypy everything it decorates is untyped.)

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

TILE = tl.constexpr(4096)

_SIGN = tl.constexpr(0x80000000)
_INFINITY = tl.constexpr(0x7F800000)
_NAN_SCALE = tl.constexpr(0x7FC00000)
_BF16_MASK = tl.constexpr(0xFFFF0000)
_MIN_SCALE = tl.constexpr(0x00800000)  # formats.MIN_SCALE, 2^-126
_SLOT_GROUP = tl.constexpr(8)  # scales in formats.ROW_ALIGNMENT bytes

_ROUND = tl.constexpr(0x4B400000)  # 1.5 * 2^23: adding it rounds to an integer, held in the low bits
_UNROUND = tl.constexpr(0x4B000000)  # 2^23: an integer put in its low bits makes the float 2^23 + integer
_UNROUND_HIGH = tl.constexpr(0x49000000)  # 2^19: the same for the bits from the fifth on
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def encode_kernel(
    source: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    numel: tl.int64,
    source_stride: tl.int64,
    out_stride: tl.int64,
    bits: tl.constexpr,
    block_size: tl.constexpr,
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
    low = _to_float(tl.load(at, mask=element < left, other=0.0))
    high = _to_float(tl.load(at + half, mask=element + half < left, other=0.0))
    _store_blocks(low, high, out + row * out_stride, tile, numel, bits, block_size, largest)


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
    out_row = row
    if order is not None:
        out_row = tl.load(order + row).to(tl.int64)
    element = _low_elements(block_size)
    left = _left_in_tile(numel, tile)
    at = out + out_row * out_stride + tile * TILE + element
    if accumulate:
        low += _to_float(tl.load(at, mask=element < left, other=0.0))
        high += _to_float(tl.load(at + half, mask=element + half < left, other=0.0))
    tl.store(at, _from_float(low, out.dtype.element_ty), mask=element < left)
    tl.store(at + half, _from_float(high, out.dtype.element_ty), mask=element + half < left)


@triton.jit
def recode_kernel(
    encoded: tl.tensor,
    out: tl.tensor,
    numel: tl.int64,
    sender_stride: tl.int64,
    encoded_stride: tl.int64,
    out_stride: tl.int64,
    factor: tl.float32,
    senders: tl.constexpr,
    bits: tl.constexpr,
    block_size: tl.constexpr,
    into_bits: tl.constexpr,
    into_block_size: tl.constexpr,
    largest: tl.constexpr,
) -> None:
    """out[k] = quantized factor * (encoded[0][k] + encoded[1][k] + ...): one pass, sums stay in registers."""
    tile, row = _position()
    low, high = _sum_senders(
        encoded + row * encoded_stride, sender_stride, tile, numel, senders, bits, block_size, into_block_size
    )
    # A new block sees zeros past the end of the row, not what the old block decodes to there (NaN, if the old
    # block is NaN and reaches further than the new one).
    element = _low_elements(into_block_size)
    left = _left_in_tile(numel, tile)
    low = tl.where(element < left, low * factor, 0.0)
    high = tl.where(element + into_block_size // 2 < left, high * factor, 0.0)
    _store_blocks(low, high, out + row * out_stride, tile, numel, into_bits, into_block_size, largest)


# Where a program is. Offsets inside a tile are 32 bits wide, the start of a tile 64.


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
    """How many of a row's `count` things are in this tile or after it, up to a tile full: fits 32 bits."""
    return tl.minimum(count - tile * per_tile, per_tile).to(tl.int32)


# Encoding.


@triton.jit
def _store_blocks(
    low: tl.tensor,
    high: tl.tensor,
    row_start: tl.tensor,
    tile: tl.tensor,
    numel: tl.tensor,
    bits: tl.constexpr,
    block_size: tl.constexpr,
    largest: tl.constexpr,
) -> None:
    """Quantize the blocks of a tile and write their payload and scales."""
    half: tl.constexpr = block_size // 2
    payload_block: tl.constexpr = block_size * bits // 8
    per_tile: tl.constexpr = TILE // block_size
    block = tl.arange(0, per_tile)
    blocks = tl.cdiv(numel, block_size)
    is_block = block < _left_in_tile(blocks, tile, per_tile)

    scale = _block_scales(low, high, bits, largest)
    low_code = _codes(low, scale, bits)
    high_code = _codes(high, scale, bits)
    at = row_start + tile * (TILE * bits // 8) + block[:, None] * payload_block + tl.arange(0, half)[None, :]
    if bits == 8:
        tl.store(at, low_code.to(tl.uint8), mask=is_block[:, None])
        tl.store(at + half, high_code.to(tl.uint8), mask=is_block[:, None])
    else:
        tl.store(at, (low_code | high_code << 4).to(tl.uint8), mask=is_block[:, None])

    # The zeros that end a row have the width of up to 7 scales: they are written as the scales of blocks that
    # do not exist. gpu.py launches enough programs for these, too.
    slots_left = _left_in_tile(tl.cdiv(blocks, _SLOT_GROUP) * _SLOT_GROUP, tile, per_tile)
    slots = (row_start + blocks * payload_block).to(tl.pointer_type(tl.uint16))
    tl.store(
        slots + tile * per_tile + block,
        tl.where(is_block, scale >> 16, 0).to(tl.uint16),
        mask=block < slots_left,
    )


@triton.jit
def _block_scales(low: tl.tensor, high: tl.tensor, bits: tl.constexpr, largest: tl.constexpr) -> tl.tensor:
    """The scale of each block as the bits of an fp32, [n]; see [Note: Scales] in formats.py."""
    exact = _bits(_extremes(low, high, bits))
    sign = exact & _SIGN
    exact ^= sign
    sign = tl.where(exact == 0, 0, sign)  # of zeros: never -0.0
    rounded = (exact + 0x7FFF + (exact >> 16 & 1)) & _BF16_MASK  # to nearest even
    max_magnitude: tl.constexpr = 127.0 if bits == 8 else 8.0
    overflows = _float(rounded) * max_magnitude > largest
    scale = tl.maximum(tl.where(overflows, exact & _BF16_MASK, rounded), _MIN_SCALE)
    return tl.where(exact < _INFINITY, sign | scale, _NAN_SCALE)


@triton.jit
def _extremes(low: tl.tensor, high: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """The exact scale of each block: NaN or Inf if the block holds one."""
    if bits == 8:
        magnitude = tl.maximum(_bits(low) & 0x7FFFFFFF, _bits(high) & 0x7FFFFFFF)
        return _float(tl.max(magnitude, axis=1)) * (1.0 / 127)
    # Rotated by one bit, the sign is the lowest: the largest integer is the largest magnitude, and of +m and
    # -m it is -m.
    low_key = _bits(low) << 1 | _bits(low) >> 31
    high_key = _bits(high) << 1 | _bits(high) >> 31
    key = tl.max(tl.maximum(low_key, high_key), axis=1)
    return _float(key >> 1 | key << 31) * -0.125


@triton.jit
def _codes(x: tl.tensor, scale: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """The payload of x, [n, B/2] uint32: the low 8 bits are an int8 code, the low 4 an int4 code + 8."""
    zero: tl.constexpr = _ROUND if bits == 8 else _ROUND + 8
    max_code: tl.constexpr = 127 if bits == 8 else 7
    # In a NaN block all codes are 0: numbers are multiplied by 0; the bits of NaN, a large integer, are cut.
    is_number = scale != _NAN_SCALE
    inverse = tl.where(is_number, tl.math.div_rn(1.0, _float(scale)), 0.0)
    greatest = tl.where(is_number, zero + max_code, zero).to(tl.uint32)
    code = _bits(x * inverse[:, None] + (12582912.0 if bits == 8 else 12582912.0 + 8))
    if bits == 8:  # a scale rounded toward zero gives -127.99 steps or more; of int4, -8.07, which are -8
        code = tl.maximum(code, zero - 127)
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
    # -0.0, not 0.0, is what leaves every number as it is when added to it, -0.0 included. (Made of its bits:
    # Triton's full() turns -0.0 into 0.0.)
    low = _float(tl.full([TILE // into_block_size, into_block_size // 2], _SIGN, tl.uint32))
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
    scale = _scale_values(tl.load(slots + tile * per_tile + block, mask=is_block, other=0))[:, None]
    byte = tl.load(at, mask=is_block[:, None], other=0)
    if bits == 8:
        high_byte = tl.load(at + half, mask=is_block[:, None], other=0)
        return low + _int8_values(byte) * scale, high + _int8_values(high_byte) * scale
    return low + _low_int4_values(byte) * scale, high + _high_int4_values(byte) * scale


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
    """The same for any elements of the tile, each with its own byte and scale: for unequal block sizes."""
    in_row = element < _left_in_tile(numel, tile)
    block = element // block_size
    if bits == 8:
        code = _int8_values(tl.load(row_start + tile * TILE + element, mask=in_row, other=0))
    else:
        half: tl.constexpr = block_size // 2
        at = row_start + tile * (TILE // 2) + block * half + element % half
        byte = tl.load(at, mask=in_row, other=0)
        code = tl.where(element % block_size < half, _low_int4_values(byte), _high_int4_values(byte))
    payload_bytes = tl.cdiv(numel, block_size) * (block_size * bits // 8)
    slots = (row_start + payload_bytes).to(tl.pointer_type(tl.uint16))
    scale = tl.load(slots + tile * (TILE // block_size) + block, mask=in_row, other=0)
    return total + code * _scale_values(scale)


# Payload bytes as fp32 codes. An integer in the low bits of 2^23 is the float 2^23 + integer; what is too
# much is subtracted. Exact, and cheaper than a conversion.


@triton.jit
def _int8_values(byte: tl.tensor) -> tl.tensor:
    """Flipping the sign bit of a two's complement byte adds 128."""
    return _float(byte.to(tl.uint32) ^ (_UNROUND | 0x80)) - (8388608.0 + 128)


@triton.jit
def _low_int4_values(byte: tl.tensor) -> tl.tensor:
    return _float(byte.to(tl.uint32) & 0x0F | _UNROUND) - (8388608.0 + 8)


@triton.jit
def _high_int4_values(byte: tl.tensor) -> tl.tensor:
    """Not shifted down: above 2^19, the fifth bit is worth 1."""
    return _float(byte.to(tl.uint32) & 0xF0 | _UNROUND_HIGH) - (524288.0 + 8)


@triton.jit
def _scale_values(bf16_bits: tl.tensor) -> tl.tensor:
    return _float(bf16_bits.to(tl.uint32) << 16)


# Numbers and their bits.


@triton.jit
def _bits(x: tl.tensor) -> tl.tensor:
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _float(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _to_float(x: tl.tensor) -> tl.tensor:
    """x as fp32; of bf16 the bits, because the interpreter's cast loses subnormals."""
    if x.dtype == tl.bfloat16:
        return _scale_values(x.to(tl.uint16, bitcast=True))
    return x.to(tl.float32)


@triton.jit
def _from_float(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """x rounded to nearest even: one instruction on a GPU; the interpreter's cast to bf16 truncates."""
    if _INTERPRETED and dtype == tl.bfloat16:
        rounded = (_bits(x) + 0x7FFF + (_bits(x) >> 16 & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)
