"""The rotation that a format may apply before it quantizes: it spreads every outlier over its group.

[Note: Rotation]
A row is cut into groups of 64 consecutive elements. The rest at its end (S % 64 elements) is not rotated. So
a rotated row has as many elements as the row, and cutting rows at whole groups changes nothing.

    rotated = H D x     H  Hadamard matrix of order 64 / 8 (orthonormal, symmetric), as six butterfly stages
    x = D H rotated     D  fixed signs

The rotation is linear: sums of rotated rows are rotated sums. So a reduction over several hops is rotated
once, and turned back once, after the last sum.

The signs are needed. Without them a group with a mean, as many gradients have, becomes one outlier (relative
error of int4, block 128, on N(1, 1): .092 without rotation, .218 without signs, .093 with them). The signs
are a bent function, (-1)^(i0 i1 + i2 i3 + i4 i5) of the bits of the position: a constant group, and every
other square wave of H, becomes coefficients of equal magnitude. Such functions exist for 64, not for 32.

NaN or Inf makes its whole group NaN or Inf. Groups do not cross blocks, so the block is decoded to NaN, as
without rotation. Finite groups stay finite, even near the largest number of a dtype: the input is divided by
64 first, so that no stage overflows, and results that exceed the dtype are cut to its largest number.

Every implementation adds in the same order, so all of them have the same bits: stages of distance 1, 2, 4, 8,
16, 32. A stage makes (a + b, a - b) of elements a and b at that distance.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 64
DISTANCES = (1, 2, 4, 8, 16, 32)
BEFORE, AFTER = 2.0**-6, 2.0**3
"""Factors before and after the stages: 1 / sqrt(64), in two steps that cannot overflow."""
IS_NEGATIVE = tuple((i & i >> 1 & 0b010101).bit_count() % 2 == 1 for i in range(GROUP))
LARGEST_FP32 = torch.finfo(torch.float32).max


def rotate(x: Tensor) -> Tensor:
    """Rotate x [rows, S] fp32."""
    groups, tail = _split(x)
    return torch.cat([_transform(groups * _signs(x), LARGEST_FP32).view(x.shape[0], -1), tail], dim=1)


def unrotate(x: Tensor, largest: float) -> Tensor:
    """Turn x back. Finite results beyond `largest`, that of the dtype of the output, are cut to it."""
    groups, tail = _split(x)
    back = _transform(groups, largest) * _signs(x)
    return torch.cat([back.view(x.shape[0], -1), _cut(tail, largest)], dim=1)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = x.shape[1] // GROUP * GROUP
    return x[:, :whole].reshape(-1, GROUP), x[:, whole:]


def _signs(x: Tensor) -> Tensor:
    """-1.0 where IS_NEGATIVE, else 1.0. Made on the device, because an upload would wait for it."""
    i = torch.arange(GROUP, device=x.device)
    both = i & i >> 1  # bits 0, 2 and 4: i0 i1, i2 i3, i4 i5
    return 1.0 - 2.0 * ((both ^ both >> 2 ^ both >> 4) & 1)


def _transform(groups: Tensor, largest: float) -> Tensor:
    x = groups * BEFORE
    for distance in DISTANCES:
        a, b = x.view(-1, GROUP // 2 // distance, 2, distance).unbind(2)
        x = torch.stack([a + b, a - b], dim=2).view(-1, GROUP)
    return _cut(x, largest / AFTER) * AFTER


def _cut(x: Tensor, largest: float) -> Tensor:
    """Cut finite numbers to +-largest. The others become NaN: x - x is 0, or NaN if x is not finite."""
    return x.clamp(-largest, largest) + (x - x)
