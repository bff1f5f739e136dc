"""The block formats, as plain torch defines them: errors, exact values, NaN and Inf."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zeropp.quant import BlockFormat, reference

FORMATS = [BlockFormat(bits, block) for bits in (8, 4) for block in (32, 128, 4096)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROTATED = [BlockFormat(bits, block, rotate=True) for bits in (8, 4) for block in (64, 128, 4096)]
SIZES = st.sampled_from([0, 1, 2, 31, 127, 128, 129, 1009]) | st.integers(0, 700)


def encode(fmt: BlockFormat, x: Tensor) -> Tensor:
    out = torch.full((x.shape[0], fmt.row_bytes(x.shape[1])), 0xAA, dtype=torch.uint8)
    reference.encode(fmt, x, out)
    return out


def roundtrip(fmt: BlockFormat, x: Tensor) -> Tensor:
    out = torch.full_like(x, math.nan)
    reference.decode(fmt, encode(fmt, x), out)
    return out


def steps(fmt: BlockFormat, x: Tensor) -> Tensor:
    """The size of one step at each element: a block's largest magnitude over that of its code."""
    step = torch.empty(x.shape, dtype=torch.float64)
    for start in range(0, x.shape[1], fmt.block_size):
        block = slice(start, start + fmt.block_size)
        step[:, block] = x[:, block].double().abs().amax(1, keepdim=True) / -fmt.min_code
    return step


@given(
    st.sampled_from(FORMATS),
    st.sampled_from(DTYPES),
    st.integers(1, 3),
    SIZES,
    st.sampled_from([1e-30, 1e-3, 1.0, 1e3, 6e4]),
    st.integers(0, 10_000),
)
def test_error_is_within_half_a_step(
    fmt: BlockFormat, dtype: torch.dtype, rows: int, numel: int, magnitude: float, seed: int
) -> None:
    x = torch.rand(rows, numel, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    x = (x * magnitude).to(dtype)
    y, step = roundtrip(fmt, x), steps(fmt, x)
    error = (y.double() - x.double()).abs()
    rounding = x.double().abs() * torch.finfo(dtype).eps + torch.finfo(dtype).tiny
    half_step = 0.502 * step  # the scale is rounded to bf16, too
    if fmt.bits == 4:  # the side opposite to the extreme has one code less
        clipped = error > half_step + rounding
        assert (x[clipped].double().abs() > 7.4 * step[clipped]).all()
        half_step = torch.where(clipped, 1.03 * step, half_step)  # up to 8 steps, cut to 7 of up to 0.4% less
    assert (error <= half_step + rounding).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_extreme_is_not_clipped(fmt: BlockFormat, dtype: torch.dtype) -> None:
    for sign in (1, -1):
        x = torch.randn(64, fmt.block_size).to(dtype)
        x[:, 7] = sign * (x.abs().amax(1) * 1.5 + 1)
        y = roundtrip(fmt, x)
        error = (y[:, 7].double() - x[:, 7].double()).abs()
        assert (error <= 0.5 * steps(fmt, x)[:, 7] + x[:, 7].double().abs() * torch.finfo(dtype).eps).all()


def test_all_codes_are_used() -> None:
    ramp = torch.linspace(-1, 1, 4096).unsqueeze(0)
    payload = encode(BlockFormat(8, 4096), ramp)[0, :4096].view(torch.int8)
    assert set(payload.tolist()) == set(range(-127, 128))
    packed = encode(BlockFormat(4, 4096), ramp)[0, :2048]
    assert set((packed & 15).tolist()) | set((packed >> 4).tolist()) == set(range(16))


def test_rounding_is_to_nearest_even() -> None:
    """With a step of exactly one, halves go to the even neighbour."""
    x = torch.tensor([[-127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5] + [0.0] * 25])
    assert roundtrip(BlockFormat(8, 32), x)[0, :7].tolist() == [-127, 0, 2, 2, 0, -2, -2]
    x = torch.tensor([[-8.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5] + [0.0] * 25])
    assert roundtrip(BlockFormat(4, 32), x)[0, :7].tolist() == [-8, 0, 2, 2, 0, -2, -2]


@given(st.sampled_from(FORMATS), st.sampled_from(DTYPES), SIZES)
def test_zeros_stay_zero(fmt: BlockFormat, dtype: torch.dtype, numel: int) -> None:
    x = torch.randn(2, numel).to(dtype)
    x[:, ::3] = 0
    x[1] = 0
    y = roundtrip(fmt, x)
    assert (y[:, ::3] == 0).all()
    assert (y[1] == 0).all()


@given(
    st.sampled_from(FORMATS + ROTATED),
    st.sampled_from(DTYPES),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.integers(1, 500),
    st.data(),
)
def test_a_block_with_nan_or_inf_comes_back_not_finite_and_alone(
    fmt: BlockFormat, dtype: torch.dtype, bad: float, numel: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, numel - 1))
    x = torch.randn(2, numel).to(dtype)
    x[0, position] = bad
    y = roundtrip(fmt, x)
    start = position // fmt.block_size * fmt.block_size
    inside = torch.zeros_like(x, dtype=torch.bool)
    inside[0, start : start + fmt.block_size] = True
    assert y[inside].isnan().all()
    assert y[~inside].isfinite().all()


@given(st.sampled_from(FORMATS), st.sampled_from(DTYPES), st.integers(0, 400))
def test_finite_in_finite_out(fmt: BlockFormat, dtype: torch.dtype, below: int) -> None:
    """Even for the largest numbers of the dtype, where rounding the scale up would overflow."""
    largest = torch.finfo(dtype).max
    x = torch.tensor([[largest * (1 - below * 1e-4), -largest / 3, 1.0]]).to(dtype)
    y = roundtrip(fmt, x)
    assert y.isfinite().all()
    assert (y.double() - x.double()).abs().max() <= x.double().abs().max() / -fmt.min_code


@given(st.sampled_from(FORMATS), st.floats(0, 1e-36, allow_subnormal=True))
def test_tiny_numbers_keep_their_order_of_magnitude_or_become_zero(fmt: BlockFormat, tiny: float) -> None:
    x = torch.tensor([[tiny, -tiny / 2]], dtype=torch.float32)
    y = roundtrip(fmt, x)
    assert y.isfinite().all()
    assert (y - x).abs().max() <= max(0.51 * x.abs().max().item() / -fmt.min_code, 2.0**-127)


@pytest.mark.parametrize(
    ("fmt", "largest"),
    [(BlockFormat(8, 128), 0.0075), (BlockFormat(4, 128), 0.11), (BlockFormat(4, 64), 0.1)],
)
def test_relative_error_and_bias_on_a_gaussian(fmt: BlockFormat, largest: float) -> None:
    """The bounds of int8 and int4 with blocks of 128, and of int4 with blocks of 64."""
    x = torch.randn(1, 1 << 20, generator=torch.Generator().manual_seed(0))
    error = (roundtrip(fmt, x) - x).double()
    assert error.norm() / x.norm() < largest
    assert error.mean().abs() < 4 * error.std() / math.sqrt(error.numel())


@given(st.sampled_from(FORMATS), SIZES, st.integers(1, 5), st.sampled_from([1.0, 0.25, 1 / 3]))
def test_decode_sum_is_the_fp32_sum(fmt: BlockFormat, numel: int, senders: int, factor: float) -> None:
    x = torch.randn(senders, 2, numel)
    encoded = torch.stack([encode(fmt, sender) for sender in x])
    decoded = torch.stack([roundtrip(fmt, sender) for sender in x])
    total = decoded[0]
    for sender in decoded[1:]:
        total = total + sender
    total = total * factor
    out = torch.full((2, numel), math.nan)
    reference.decode_sum(fmt, encoded, out, factor)
    assert torch.equal(out, total)
    reference.decode_sum(fmt, encoded, out, factor, accumulate=True)
    assert torch.equal(out, total + total)
    into = BlockFormat(4, 128)
    recoded = torch.empty(2, into.row_bytes(numel), dtype=torch.uint8)
    reference.recode(fmt, encoded, into, recoded, numel, factor)
    assert torch.equal(recoded, encode(into, total))


@given(st.permutations(range(5)), SIZES)
def test_row_orders(order: list[int], numel: int) -> None:
    fmt = BlockFormat(8, 32)
    x = torch.randn(5, numel)
    plain, ordered = encode(fmt, x), torch.empty(5, fmt.row_bytes(numel), dtype=torch.uint8)
    reference.encode(fmt, x, ordered, order)
    assert torch.equal(ordered, plain[order])
    back = torch.empty_like(x)
    reference.decode(fmt, ordered, back, order)
    assert torch.equal(back, roundtrip(fmt, x))
