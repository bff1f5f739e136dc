"""The rotation in Triton, on the halves of blocks that kernels.py works with. See [Note: Rotation]."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from ..rotation import AFTER, BEFORE
from ..rotation import GROUP as GROUP_SIZE
from .bits import as_bits, as_float

GROUP = tl.constexpr(GROUP_SIZE)
_BEFORE, _AFTER = tl.constexpr(BEFORE), tl.constexpr(AFTER)


@triton.jit
def rotate(
    low: tl.tensor,
    high: tl.tensor,
    element: tl.tensor,
    left: tl.tensor,
    block_size: tl.constexpr,
    largest: tl.constexpr,
    inverse: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Rotate a tile, or turn it back. `element` are the positions of the lower halves, [n, B/2].

    Only whole groups of the `left` elements are rotated. Finite results are cut to +-largest.
    """
    half: tl.constexpr = block_size // 2
    whole = left // GROUP * GROUP
    if half >= GROUP:  # groups lie in one half or the other
        new_low = tl.reshape(_rotate_groups(_groups(low), largest, inverse), low.shape)
        new_high = tl.reshape(_rotate_groups(_groups(high), largest, inverse), high.shape)
    else:  # groups are one block, or two
        both = tl.permute(tl.join(low, high), (0, 2, 1))  # [n, 2, B/2]
        both = tl.reshape(_rotate_groups(_groups(both), largest, inverse), both.shape)
        new_low, new_high = tl.split(tl.permute(both, (0, 2, 1)))
    low = tl.where(element < whole, new_low, _cut(low, largest))
    high = tl.where(element + half < whole, new_high, _cut(high, largest))
    return low, high


@triton.jit
def _groups(x: tl.tensor) -> tl.tensor:
    return tl.reshape(x, [x.numel // GROUP, GROUP])


@triton.jit
def _rotate_groups(x: tl.tensor, largest: tl.constexpr, inverse: tl.constexpr) -> tl.tensor:
    """x [groups, 64]."""
    position = tl.arange(0, GROUP).to(tl.uint32)
    pairs = position & position >> 1
    signs = ((pairs ^ pairs >> 2 ^ pairs >> 4) & 1) << 31  # the bent function, as sign bits
    if not inverse:
        x = as_float(as_bits(x) ^ signs[None, :])
    x *= _BEFORE
    x = _stage(x, 1)
    x = _stage(x, 2)
    x = _stage(x, 4)
    x = _stage(x, 8)
    x = _stage(x, 16)
    x = _stage(x, 32)
    x = _cut(x, largest / _AFTER) * _AFTER
    if inverse:
        x = as_float(as_bits(x) ^ signs[None, :])
    return x


@triton.jit
def _stage(x: tl.tensor, distance: tl.constexpr) -> tl.tensor:
    """(a + b, a - b) of all elements a and b at this distance."""
    pairs = tl.reshape(x, [x.numel // (2 * distance), 2, distance])
    a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), x.shape)


@triton.jit
def _cut(x: tl.tensor, largest: tl.constexpr) -> tl.tensor:
    """Cut finite numbers to +-largest. The others become NaN: x - x is 0, or NaN if x is not finite."""
    cut = tl.where(x < largest, x, largest)
    return tl.where(cut > -largest, cut, -largest) + (x - x)
