"""Numbers, their bits and their payload bytes in Triton, for kernels.py."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from triton.language.target_info import is_hip  # type: ignore[import-not-found, import-untyped, unused-ignore]

from .. import noise

TILE = tl.constexpr(4096)

_UNROUND = tl.constexpr(0x4B000000)  # 2^23: an integer put in its low bits makes the float 2^23 + integer
_UNROUND_HIGH = tl.constexpr(0x49000000)  # 2^19: the same for the bits from the fifth on
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_SHIFT_0, _SHIFT_1, _SHIFT_2 = (tl.constexpr(shift) for shift in noise.SHIFTS)
_MULTIPLIER_0, _MULTIPLIER_1 = (tl.constexpr(multiplier) for multiplier in noise.MULTIPLIERS)


# Payload bytes as fp32 codes. An integer in the low bits of 2^23 is the float 2^23 + integer, and 2^23 is
# subtracted. This is exact, and cheaper than a conversion.


@triton.jit
def int8_values(byte: tl.tensor) -> tl.tensor:
    """Flip the sign bit of the byte in two's complement, which adds 128."""
    return as_float(byte.to(tl.uint32) ^ (_UNROUND | 0x80)) - (8388608.0 + 128)


@triton.jit
def low_int4_values(byte: tl.tensor) -> tl.tensor:
    return as_float(byte.to(tl.uint32) & 0x0F | _UNROUND) - (8388608.0 + 8)


@triton.jit
def high_int4_values(byte: tl.tensor) -> tl.tensor:
    """The nibble is not shifted down: above 2^19, the fifth bit is worth 1."""
    return as_float(byte.to(tl.uint32) & 0xF0 | _UNROUND_HIGH) - (524288.0 + 8)


@triton.jit
def scale_values(bf16_bits: tl.tensor) -> tl.tensor:
    return as_float(bf16_bits.to(tl.uint32) << 16)


# Numbers and their bits.


@triton.jit
def as_bits(x: tl.tensor) -> tl.tensor:
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def as_float(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_float(x: tl.tensor) -> tl.tensor:
    """Return x as fp32. bf16 is converted by its bits: the interpreter's cast loses subnormals."""
    if x.dtype == tl.bfloat16:
        return scale_values(x.to(tl.uint16, bitcast=True))
    return x.to(tl.float32)


@triton.jit
def from_float(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Round x to nearest even: one instruction on a GPU. The interpreter's cast to bf16 truncates."""
    if _INTERPRETED and dtype == tl.bfloat16:
        rounded = (as_bits(x) + 0x7FFF + (as_bits(x) >> 16 & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    if is_hip() and dtype == tl.float16:
        # No instruction, but the compiler cannot see that. It would make one v_fma_mixlo_f16 of a product and
        # its rounding, which adds +0.0: -0.0 would come out as +0.0.
        x = tl.inline_asm_elementwise("", "=v,0", [x], tl.float32, is_pure=True, pack=1)
    return x.to(dtype)


# Noise: see [Note: Noise] in noise.py.


@triton.jit
def mix(x: tl.tensor) -> tl.tensor:
    """Hash uint32 to uint32."""
    x ^= x >> _SHIFT_0
    x *= _MULTIPLIER_0
    x ^= x >> _SHIFT_1
    x *= _MULTIPLIER_1
    return x ^ x >> _SHIFT_2


@triton.jit
def to_noise(random: tl.tensor) -> tl.tensor:
    """Return the noise of the upper 16 of 32 random bits."""
    return (random.to(tl.int32, bitcast=True) >> 16 | 1).to(tl.float32) * 0.0000152587890625
