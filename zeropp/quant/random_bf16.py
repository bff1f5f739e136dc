"""fp32 rounded to bf16, up or down at random, so that the mean over seeds is the fp32 number.

A bf16 sum that is rounded to nearest loses every addend below 1/512 of the sum. Rounded at random, it is
wrong by at most one step of bf16 (1/128) each time, in either direction, and exact in the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .noise import make_noise_bits

BLOCK = 128
PIECE = 1 << 18
"""Elements that are rounded at a time: noise takes 64-bit integers, more memory than bf16 saves."""


def round_at_random(source: Tensor, out: Tensor, seed: int, offset: int = 0) -> None:
    """out = source, fp32 [R, S] to bf16 [R, S]. NaN and Inf stay NaN and Inf.

    The same seed gives the same bits. Columns from `offset` on give the bits that they have in the whole row,
    if `offset` is a multiple of 128.
    """
    rows, columns = source.shape
    step = max(BLOCK, PIECE // rows // BLOCK * BLOCK)
    for start in range(0, columns, step):
        piece = source[:, start : start + step]
        blocks = -(-piece.shape[1] // BLOCK)
        noise = make_noise_bits(seed, offset + start, rows, blocks, BLOCK, source.device)
        noise = noise.view(rows, -1)[:, : piece.shape[1]].to(torch.int32)
        # bf16 is the upper half of fp32. Adding 16 random bits carries with the probability of rounding up.
        rounded = (piece.contiguous().view(torch.int32) + noise) & -0x10000
        finite = piece.isfinite()
        out[:, start : start + step].copy_(torch.where(finite, rounded.view(torch.float32), piece))
