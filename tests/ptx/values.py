"""Values of registers: bits in every lane, and which of them were never written.

[Note: Unwritten values]
A register, or a byte of shared memory, that was never written makes every result unwritten that is computed
from it, in that thread. It is an error where it would show: stored to global memory, in an address, a
predicate or a branch. So lanes that compute with nothing and whose results nobody uses are allowed; Triton
emits such code: a reduction over four warps shuffles 32 lanes, of which four hold a value, and a sum of pairs
(f32x2) may use one half.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .floats import Bits
from .operations import SIGNED, UNSIGNED, Operation, pack, unpack

Mask: TypeAlias = NDArray[np.bool_] | None
"""The lanes that execute an instruction. None: all."""


@dataclass(frozen=True)
class Value:
    bits: Bits
    """[lanes], or [1] if all lanes have the same."""
    unwritten: Bits | None = None
    """A mask of the bits that were never written, of the same dtype. None: there are none."""

    @property
    def missing(self) -> Bits:
        return np.zeros(1, self.bits.dtype) if self.unwritten is None else self.unwritten


@functools.cache
def never_written(bits: int) -> Value:
    zeros = np.zeros(1, UNSIGNED[bits])
    return Value(zeros, ~zeros)


def extended(bits: Bits, width: int, wider: int, signed: bool) -> Bits:
    """With zeros, or with the sign."""
    if not signed:
        return bits.astype(UNSIGNED[wider])
    signed_bits: Bits = bits.view(SIGNED[width]).astype(SIGNED[wider])
    return signed_bits.view(UNSIGNED[wider])


def unwritten_results(operation: Operation, values: Sequence[Value]) -> Bits | None:
    """The bits of a result that were computed from unwritten ones: all of a part, or those that moved."""
    masks = [value.unwritten for value in values if value.unwritten is not None]
    if not masks:
        return None
    moved, width = operation.moved, operation.result
    if moved and all(value.unwritten is None for value in values[moved:]):
        missing = (value.missing for value in values[:moved])
        return operation.compute(*missing, *(value.bits for value in values[moved:]))
    if operation.parts == 1:
        touched = functools.reduce(np.logical_or, (mask != 0 for mask in masks))
        return all_or_no_bits(touched, UNSIGNED[width])
    together = unpack(functools.reduce(np.bitwise_or, masks), width, operation.parts)
    each = UNSIGNED[width // operation.parts]
    return pack([all_or_no_bits(part != 0, each) for part in together], width)


def all_or_no_bits(missing: Bits, kind: Any) -> Bits:
    return np.where(missing, ~np.zeros(1, kind), np.zeros(1, kind))
