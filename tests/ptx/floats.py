"""IEEE arithmetic on bits, as NVIDIA's instructions do it: to nearest even, subnormals kept, one NaN.

Arrays hold bits (uint16, uint32). NumPy computes an operation in the format of its operands, and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bits: TypeAlias = NDArray[Any]

NAN32, NAN16 = 0x7FFFFFFF, 0x7FFF
"""The NaN that an instruction returns. Payloads of its operands do not survive."""
SIGN, EXPONENT, MAGNITUDE = np.uint32(0x80000000), np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)

ARITHMETIC: dict[str, Callable[..., Bits]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
}


def arithmetic(name: str, a: Bits, b: Bits) -> Bits:
    return _one_nan(ARITHMETIC[name](a.view(np.float32), b.view(np.float32)))


def flush(bits: Bits) -> Bits:
    """Subnormals become zeros of their sign (`.ftz`)."""
    return np.where(bits & EXPONENT == 0, bits & SIGN, bits)


def smaller_or_larger(name: str, keep_nan: bool, a: Bits, b: Bits) -> Bits:
    """min or max: -0.0 is less than +0.0. A NaN loses to a number, except with `.NaN`."""
    order_a, order_b = _order(a), _order(b)
    first = order_a <= order_b if name == "min" else order_a >= order_b
    result = np.where(first, a, b)
    a_nan, b_nan = is_nan(a), is_nan(b)
    if keep_nan:
        return np.where(a_nan | b_nan, np.uint32(NAN32), result)
    result = np.where(a_nan, b, np.where(b_nan, a, result))
    return np.where(a_nan & b_nan, np.uint32(NAN32), result)


def compare(name: str, a: Bits, b: Bits) -> Bits:
    """setp. With NaN, `lt` and the other plain comparisons are false, `ltu` and the like true."""
    unordered = is_nan(a) | is_nan(b)
    if name in ("num", "nan"):
        return unordered if name == "nan" else ~unordered
    x, y = a.view(np.float32), b.view(np.float32)
    result: Bits = COMPARISONS[name[:2]](x, y)
    return result | unordered if name.endswith("u") else result & ~unordered


COMPARISONS: dict[str, Callable[..., Bits]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def to_fp16(bits: Bits) -> Bits:
    half = bits.view(np.float32).astype(np.float16).view(np.uint16)
    return np.where(is_nan(bits), np.uint16(NAN16), half)


def to_bf16(bits: Bits) -> Bits:
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(is_nan(bits), np.uint32(NAN16), rounded).astype(np.uint16)


def cut_to_bf16(bits: Bits) -> Bits:
    """Toward zero (`.rz`)."""
    return np.where(is_nan(bits), np.uint32(NAN16), bits >> np.uint32(16)).astype(np.uint16)


def from_fp16(bits: Bits) -> Bits:
    return _one_nan(bits.view(np.float16).astype(np.float32))


def from_bf16(bits: Bits) -> Bits:
    return _one_nan((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))


def is_nan(bits: Bits) -> Bits:
    return bits & MAGNITUDE > EXPONENT


def _one_nan(x: Bits) -> Bits:
    return np.where(np.isnan(x), np.uint32(NAN32), x.view(np.uint32))


def _order(bits: Bits) -> Bits:
    """Integers in the order of the numbers, -0.0 before +0.0."""
    magnitude = (bits & MAGNITUDE).astype(np.int64)
    return np.where(bits & SIGN != 0, -1 - magnitude, magnitude)
