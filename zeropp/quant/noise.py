"""The noise of stochastic rounding: a number in (-1/2, 1/2) for every element, from its position only.

[Note: Noise]
    code = round_to_nearest(x / scale + noise), so that the mean over seeds of the decoded value is x

    key(seed, row)  = mix(seed_key(seed) + row)      row: of the encoded rows
    bits            = mix(key ^ (offset + column))   column: of the row; offset: of the call
    noise[j]        = (low half of bits | 1) * 2^-16    of element j < B/2 of a block, which has that column;
    noise[j + B/2]  = (high half of bits | 1) * 2^-16   16 bits with a sign each

All integers have 32 bits and wrap around. One hash serves two elements, because it takes most of the time.
There is no state: the same seed gives the same bytes on every device, in any number of threads. A row that is
cut into chunks of whole blocks gives the same bytes as the row, if the offset of every chunk is the column at
which it starts. The noise is symmetric (its mean is exactly 0) and never a tie, so zeros stay zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import Seed

MASK = 0xFFFFFFFF
# "lowbias32" of Chris Wellons' hash prospector (public domain): a bijection in which every bit of the input
# changes every bit of the output with a probability close to 1/2.
SHIFTS, MULTIPLIERS = (16, 15, 16), (0x7FEB352D, 0x846CA68B)


def seed_key(seed: Seed) -> int:
    """Return the seed, an integer from 0 to 2^64 - 1, as 32 bits.

    >>> seed_key(0) != seed_key(1) != seed_key(1 << 32)
    True
    """
    if seed is None or not 0 <= seed < 1 << 64:
        raise ValueError(f"seed is {seed}; stochastic rounding needs one, an integer from 0 to 2^64 - 1")
    return _mix_int(_mix_int((seed & MASK) + 1 & MASK) ^ seed >> 32)


def make_noise(
    seed: Seed, offset: int, rows: int, blocks: int, block_size: int, device: torch.device
) -> Tensor:
    """Return noise, fp32 [rows, blocks, block_size]."""
    bits = make_noise_bits(seed, offset, rows, blocks, block_size, device)
    return ((bits ^ 0x8000) - 0x8000 | 1).float() * 2.0**-16


def make_noise_bits(
    seed: Seed, offset: int, rows: int, blocks: int, block_size: int, device: torch.device
) -> Tensor:
    """Return 16 random bits for each element, as int64 [rows, blocks, block_size]."""
    key = _mix(torch.arange(rows, device=device) + seed_key(seed) & MASK)
    block = torch.arange(blocks, device=device) * block_size + offset
    column = block.unsqueeze(1) + torch.arange(block_size // 2, device=device) & MASK
    bits = _mix(key.view(-1, 1, 1) ^ column)
    return torch.cat([bits & 0xFFFF, bits >> 16], dim=-1)


def _mix(x: Tensor) -> Tensor:
    """Mix 32 bits without a sign. They are in int64 tensors, because torch cannot compute with uint32."""
    x = x ^ x >> SHIFTS[0]
    x = x * MULTIPLIERS[0] & MASK
    x = x ^ x >> SHIFTS[1]
    x = x * MULTIPLIERS[1] & MASK
    return x ^ x >> SHIFTS[2]


def _mix_int(x: int) -> int:
    return int(_mix(torch.tensor(x)))
