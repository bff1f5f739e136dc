"""The block formats: how a row of numbers is laid out as bytes.

A *row* is what one rank sends to one other rank: S elements of one dtype. It is cut into blocks of B
elements, the last one padded with zeros. Every block has one bf16 scale:

    row  [ payload: blocks * B * bits / 8 bytes | scales: blocks * 2 bytes | zeros up to 16 bytes ]

    int8 payload   byte j of a block = code of element j, two's complement, -127 .. 127
    int4 payload   byte j of a block = (code[j] + 8) | (code[j + B/2] + 8) << 4, codes -8 .. 7

Payload and scales are sent in one buffer. Rows start at multiples of 16 bytes, so that kernels can use
full-width loads on each of them.

[Note: Scales]
    int8   scale = bf16(absmax * (1/127)), code = round(x * (1/scale))
    int4   scale = bf16(extreme / -8), where extreme is the element of the largest magnitude, with its sign
           (of +m and -m: -m). The extreme becomes code -8 exactly, and all 16 codes are used. A value of the
           opposite sign between 7.5 and 8 steps is clipped to 7 steps.
    int4, stochastic
           scale = bf16(absmax * (1/7)), codes -7 .. 7: no value is clipped, because clipping is a bias
A stochastic format rounds the scale up, for the same reason, and adds noise before it rounds a code; see
[Note: Noise] in noise.py. A rotated format quantizes the rotated row; see [Note: Rotation] in rotation.py.

Every implementation computes in fp32, in this order, and rounds to nearest even, so that all of them produce
the same bytes. Three cases are decided for each block:
    - |scale| is at least 2^-126, so that 1/scale is finite. A block of zeros has the scale +2^-126 and
      decodes to zeros.
    - If the scale were rounded up to bf16 and the decoded extreme would then overflow the source dtype (if
      rotated: fp32), the scale is rounded toward zero instead. The extreme is clipped by less than a step:
      finite in, finite out.
    - If the block has NaN or Inf, the scale is NaN (0x7fc0) and the codes are zero, so the whole block is
      decoded to NaN. Loss scaling depends on this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .rotation import GROUP

RowOrder = Sequence[int] | None
"""A permutation of rows: the reorder before a hop, or the transpose after it. None leaves rows in place."""
Seed = int | None
"""An integer from 0 to 2^64 - 1, for formats that round at random; the others ignore it."""

ROW_ALIGNMENT = 16
SCALE_BYTES = 2
MIN_SCALE = 2.0**-126
NAN_SCALE_BITS = 0x7FC0


@dataclass(frozen=True)
class BlockFormat:
    """Block-quantized integers of `bits` bits, one bf16 scale per `block_size` elements.

    >>> BlockFormat(bits=4, block_size=128).effective_bits
    4.125
    """

    bits: int
    block_size: int
    rotate: bool = False
    """Encode rotates, and decode turns back. Recode between two such formats stays in rotated space."""
    stochastic: bool = False
    """Encode rounds up or down at random, so that the mean is exact. Every call needs a seed."""

    def __post_init__(self) -> None:
        if self.rotate and self.block_size % GROUP:
            raise ValueError(
                f"block_size is {self.block_size} with rotate=True; expected a multiple of {GROUP}, the size "
                "of a rotated group"
            )

    @property
    def unrotated(self) -> BlockFormat:
        """The format of the same bytes in rotated space: it decodes to, and encodes, rotated numbers."""
        return replace(self, rotate=False)

    @property
    def is_symmetric(self) -> bool:
        """Whether codes reach as far up as down, and the scale is positive."""
        return self.bits == 8 or self.stochastic

    @property
    def min_code(self) -> int:
        """The code of the block's extreme; if symmetric, that or its opposite."""
        return -self.max_code if self.is_symmetric else -8

    @property
    def max_code(self) -> int:
        return 127 if self.bits == 8 else 7

    @property
    def effective_bits(self) -> float:
        """Bits per element on the wire, scales included, for rows much longer than a block."""
        return self.bits + 8 * SCALE_BYTES / self.block_size

    def blocks(self, numel: int) -> int:
        return -(-numel // self.block_size)

    def payload_bytes(self, numel: int) -> int:
        return self.blocks(numel) * self.block_size * self.bits // 8

    def row_bytes(self, numel: int) -> int:
        return align(self.payload_bytes(numel) + self.blocks(numel) * SCALE_BYTES)


@dataclass(frozen=True)
class CastFormat:
    """Elements as numbers of `dtype`, without blocks: the dtype of the buffer, or bf16."""

    dtype: torch.dtype

    rotate = False

    @property
    def unrotated(self) -> CastFormat:
        return self

    def row_bytes(self, numel: int) -> int:
        return align(numel * self.dtype.itemsize)


def align(nbytes: int) -> int:
    """Round up to the alignment of a row."""
    return -(-nbytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
