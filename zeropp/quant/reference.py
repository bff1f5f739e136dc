"""Block quantization in plain torch: the definition that every faster implementation must equal, bit for bit.

It is written to be read: slow (a few percent of memory speed), with many allocations. An implementation is a
module with the four public functions of this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import MIN_SCALE, NAN_SCALE_BITS, SCALE_BYTES, BlockFormat, RowOrder, Seed
from .noise import make_noise
from .permute_rows import gather_rows, scatter_rows
from .rotation import LARGEST_FP32, rotate, unrotate


def encode(
    fmt: BlockFormat, source: Tensor, out: Tensor, order: RowOrder = None, seed: Seed = None, offset: int = 0
) -> None:
    """out[k] = quantized source[order[k]].

    source [rows, S] fp32, bf16 or fp16; out [rows, row_bytes] uint8. A stochastic format needs a seed; offset
    is where the rows start in the longer rows that they are a part of.
    """
    rows, numel = source.shape
    if numel == 0:
        return
    blocks, half = fmt.blocks(numel), fmt.block_size // 2
    padding = blocks * fmt.block_size - numel
    x = torch.empty(rows, numel, device=source.device)
    gather_rows(source, x, order)
    if fmt.rotate:
        x = rotate(x)
    x = torch.nn.functional.pad(x, (0, padding)).view(rows, blocks, fmt.block_size)
    largest = LARGEST_FP32 if fmt.rotate else torch.finfo(source.dtype).max
    scale = _scales(fmt, x, largest)  # [rows, blocks], fp32 holding bf16 values
    steps = x * scale.reciprocal().unsqueeze(-1)
    if fmt.stochastic:
        steps += make_noise(seed, offset, rows, blocks, fmt.block_size, x.device)
    codes = torch.round(steps).clamp(fmt.min_code, fmt.max_code)
    codes = torch.where(scale.isnan().unsqueeze(-1), 0.0, codes)
    payload, scales = _split(fmt, out, numel)
    if fmt.bits == 8:
        payload.view(torch.int8).copy_(codes.view(rows, -1))
    else:
        nibbles = (codes + 8).to(torch.uint8)
        payload.copy_((nibbles[..., :half] | nibbles[..., half:] << 4).view(rows, -1))
    bits = (scale.view(torch.int32) >> 16).to(torch.int16)  # not a cast: torch has several NaNs
    scales.view(torch.int16).copy_(torch.where(scale.isnan(), NAN_SCALE_BITS, bits))
    out[:, fmt.payload_bytes(numel) + blocks * SCALE_BYTES :] = 0


def decode(fmt: BlockFormat, encoded: Tensor, out: Tensor, order: RowOrder = None) -> None:
    """out[order[k]] = values of encoded[k].

    encoded [rows, row_bytes] uint8; out [rows, S] of any float dtype.
    """
    decode_sum(fmt, encoded.unsqueeze(0), out, order=order)


def decode_sum(
    fmt: BlockFormat, encoded: Tensor, out: Tensor,
    factor: float = 1.0, accumulate: bool = False, order: RowOrder = None,
) -> None:  # fmt: skip
    """out[order[k]] (+)= factor * (encoded[0][k] + encoded[1][k] + ...), summed in fp32 in this order.

    encoded [senders, rows, row_bytes] uint8; out [rows, S] of any float dtype (fp32 to accumulate).
    """
    total = _sum(fmt, encoded, out.shape[1], factor)
    if fmt.rotate:
        total = unrotate(total, torch.finfo(out.dtype).max)
    if accumulate:
        before = torch.empty_like(total)
        gather_rows(out, before, order)
        total = before + total
    scatter_rows(total, out, order)


def recode(
    fmt: BlockFormat, encoded: Tensor, into: BlockFormat, out: Tensor, numel: int,
    factor: float = 1.0, seed: Seed = None, offset: int = 0,
) -> None:  # fmt: skip
    """out = encode(into, factor * (encoded[0] + encoded[1] + ...)): dequantize, reduce, quantize.

    encoded [senders, rows, row_bytes] uint8; out [rows, into.row_bytes(numel)] uint8. If both formats rotate,
    the sums stay rotated: turning back and rotating again would cancel out.
    """
    total = _sum(fmt, encoded, numel, factor)
    if fmt.rotate and into.rotate:
        into = into.unrotated
    elif fmt.rotate:
        total = unrotate(total, LARGEST_FP32)
    encode(into, total, out, None, seed, offset)


def _sum(fmt: BlockFormat, encoded: Tensor, numel: int, factor: float) -> Tensor:
    total = _values(fmt, encoded[0], numel)
    for sender in encoded[1:]:
        total = total + _values(fmt, sender, numel)
    return total * factor


def _values(fmt: BlockFormat, encoded: Tensor, numel: int) -> Tensor:
    """Return the fp32 values [rows, numel] of encoded rows."""
    rows = encoded.shape[0]
    if numel == 0:
        return torch.empty(rows, 0, device=encoded.device)
    payload, scales = _split(fmt, encoded, numel)
    if fmt.bits == 8:
        codes = payload.reshape(rows, -1, fmt.block_size).view(torch.int8)
    else:
        packed = payload.reshape(rows, -1, fmt.block_size // 2).to(torch.int8)
        codes = torch.cat([packed & 15, packed >> 4 & 15], dim=-1) - 8
    values = codes * scales.float().unsqueeze(-1)  # exact: 8-bit codes times 8-bit mantissas fit in fp32
    return values.view(rows, -1)[:, :numel]


def _scales(fmt: BlockFormat, x: Tensor, largest: float) -> Tensor:
    """See [Note: Scales] in formats.py."""
    if fmt.is_symmetric:
        exact = x.abs().amax(-1) * (1.0 / fmt.max_code)
    else:
        high, low = x.amax(-1), x.amin(-1)
        exact = torch.where(-low >= high, low, high) * -0.125 + 0.0  # of zeros: never -0.0
    bits = exact.view(torch.int32)
    toward_zero = (bits & -0x10000).view(torch.float32)
    scale = (bits + 0xFFFF & -0x10000).view(torch.float32) if fmt.stochastic else exact.bfloat16().float()
    scale = torch.where(scale.abs() * -fmt.min_code > largest, toward_zero, scale)
    smallest = torch.copysign(torch.full_like(scale, MIN_SCALE), scale)
    scale = torch.where(scale.abs() < MIN_SCALE, smallest, scale)
    return torch.where(exact.isfinite(), scale, torch.nan)


def _split(fmt: BlockFormat, row: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return views of the payload (uint8) and the scales (bf16) of encoded rows."""
    end = fmt.payload_bytes(numel)
    scales = row[:, end : end + fmt.blocks(numel) * SCALE_BYTES]
    return row[:, :end], scales.view(torch.bfloat16)
