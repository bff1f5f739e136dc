from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.quant.test_reference import encode, roundtrip
from zeropp.quant import BlockFormat, reference
from zeropp.quant.rotation import GROUP, LARGEST_FP32, rotate, unrotate

FORMATS = [BlockFormat(bits, block, rotate=True) for bits in (8, 4) for block in (64, 128, 4096)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = st.sampled_from([1, 63, 64, 65, 128, 200, 1009]) | st.integers(1, 700)


def hadamard() -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < GROUP:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(GROUP)


def test_it_is_the_orthonormal_matrix_with_signs() -> None:
    matrix = rotate(torch.eye(GROUP)).double()  # row i: what the i-th unit vector becomes
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(GROUP, dtype=torch.float64))
    signs = matrix[:, 0] * math.sqrt(GROUP)
    assert set(signs.tolist()) == {1.0, -1.0}
    torch.testing.assert_close(matrix, signs.unsqueeze(1) * hadamard())


def test_constants_and_square_waves_come_out_flat() -> None:
    """Without the signs, each of these would become one coefficient of magnitude 8."""
    waves = hadamard().float() * math.sqrt(GROUP)
    assert torch.equal(rotate(waves).abs(), torch.ones(GROUP, GROUP))


@given(st.integers(1, 3), SIZES, st.integers(0, 1000))
def test_turning_back_gives_the_row(rows: int, numel: int, seed: int) -> None:
    x = torch.randn(rows, numel, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(unrotate(rotate(x), LARGEST_FP32), x)
    tail = numel % GROUP
    assert torch.equal(rotate(x)[:, numel - tail :], x[:, numel - tail :])


@given(st.sampled_from(FORMATS), SIZES, st.integers(1, 4), st.sampled_from([1.0, 0.25]))
def test_two_hops_stay_in_rotated_space(fmt: BlockFormat, numel: int, senders: int, factor: float) -> None:
    """recode, and sums between two hops: both quantize rotated sums, and decode turns them back."""
    x, into = torch.randn(senders, 2, numel), BlockFormat(4, 128, rotate=True)
    encoded = torch.stack([encode(fmt, sender) for sender in x])
    by_hand = torch.stack([encode(fmt.unrotated, rotate(sender)) for sender in x])
    assert torch.equal(encoded, by_hand)

    kept, recoded = torch.empty(2, numel), torch.empty(2, into.row_bytes(numel), dtype=torch.uint8)
    reference.decode_sum(fmt.unrotated, encoded, kept, factor)
    reference.recode(fmt, encoded, into, recoded, numel, factor)
    assert torch.equal(encode(into.unrotated, kept), recoded)

    rotated, out = torch.empty(2, numel), torch.empty(2, numel)
    reference.decode(into.unrotated, recoded, rotated)
    reference.decode(into, recoded, out)
    assert torch.equal(out, unrotate(rotated, LARGEST_FP32))


@given(st.sampled_from(FORMATS), SIZES)
def test_recode_rotates_or_turns_back_if_one_side_does(fmt: BlockFormat, numel: int) -> None:
    x, into = torch.randn(2, 2, numel), BlockFormat(4, 128, rotate=True)
    for first, second in ((fmt.unrotated, into), (fmt, into.unrotated)):
        encoded = torch.stack([encode(first, sender) for sender in x])
        total, recoded = torch.empty(2, numel), torch.empty(2, into.row_bytes(numel), dtype=torch.uint8)
        reference.decode_sum(first, encoded, total)
        reference.recode(first, encoded, second, recoded, numel)
        assert torch.equal(encode(second, total), recoded)


@given(st.sampled_from(FORMATS), st.sampled_from(DTYPES), st.integers(0, 400), st.integers(1, 300))
def test_finite_in_finite_out(fmt: BlockFormat, dtype: torch.dtype, below: int, numel: int) -> None:
    """Rotated numbers are up to eight times the dtype's largest number, and errors are added to them."""
    largest = torch.finfo(dtype).max
    x = torch.full((2, numel), largest * (1 - below * 1e-4)).to(dtype)
    x[1] *= torch.randn(numel).sign().to(dtype)
    assert roundtrip(fmt, x).isfinite().all()
    assert roundtrip(BlockFormat(fmt.bits, fmt.block_size, rotate=True), x / 16).isfinite().all()


def test_large_numbers_are_still_about_right() -> None:
    for dtype in DTYPES:
        x = (torch.rand(4, 256) * 2 - 1).mul(torch.finfo(dtype).max / 8).to(dtype)
        y = roundtrip(BlockFormat(8, 128, rotate=True), x)
        assert (y.double() - x.double()).norm() < 0.02 * x.double().norm()


@pytest.mark.parametrize(("bits", "largest"), [(8, 0.0065), (4, 0.1)])
def test_heavy_tails_lose_less_than_without(bits: int, largest: float) -> None:
    torch.manual_seed(0)
    x = torch.distributions.StudentT(3.0).sample((1, 1 << 18))
    rotated, plain = BlockFormat(bits, 128, rotate=True), BlockFormat(bits, 128)
    error = (roundtrip(rotated, x) - x).norm() / x.norm()
    assert error < largest
    assert error < 0.75 * (roundtrip(plain, x) - x).norm() / x.norm()


def test_a_block_smaller_than_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"block_size is 32 with rotate=True; expected a multiple of 64"):
        BlockFormat(4, 32, rotate=True)
