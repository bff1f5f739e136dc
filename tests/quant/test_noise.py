"""The noise of stochastic rounding, which does not change the mean."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zeropp.quant import BlockFormat, reference
from zeropp.quant.noise import make_noise, seed_key

CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**64 - 1)
FORMATS = [BlockFormat(bits, 64, rotate, stochastic=True) for bits in (8, 4) for rotate in (False, True)]


def roundtrip(fmt: BlockFormat, x: Tensor, seed: int) -> Tensor:
    encoded, out = torch.empty(x.shape[0], fmt.row_bytes(x.shape[1]), dtype=torch.uint8), torch.empty_like(x)
    reference.encode(fmt, x, encoded, seed=seed)
    reference.decode(fmt, encoded, out)
    return out


@given(SEEDS, st.integers(0, 2**33), st.integers(1, 4), st.integers(1, 5), st.integers(0, 5))
def test_a_chunk_has_the_noise_of_its_place(
    seed: int, offset: int, rows: int, blocks: int, start: int
) -> None:
    whole = make_noise(seed, offset, rows, start + blocks, 32, CPU)
    assert torch.equal(make_noise(seed, offset + 32 * start, rows, blocks, 32, CPU), whole[:, start:])
    assert torch.equal(make_noise(seed, offset, 1, start + blocks, 32, CPU), whole[:1])


def test_noise_is_uniform_symmetric_and_uncorrelated() -> None:
    """Within four standard errors: over columns, rows, and seeds that follow one another."""
    noise = torch.cat([make_noise(seed, 0, 8, 1 << 8, 128, CPU) for seed in range(8)])  # [64, 256, 128]
    noise = noise.view(64, 1 << 15)
    assert noise.abs().max() < 0.5
    counts = torch.histc(noise, 64, -0.5, 0.5)
    expected = noise.numel() / 64
    assert ((counts - expected).abs() < 4.5 * math.sqrt(expected)).all()
    deviation = 1 / math.sqrt(12)
    assert noise.mean().abs() < 4 * deviation / math.sqrt(noise.numel())
    correlation = torch.corrcoef(noise) - torch.eye(64)
    assert correlation.abs().max() < 5 / math.sqrt(1 << 15)
    neighbours = (noise[:, 1:] * noise[:, :-1]).mean() / deviation**2
    assert neighbours.abs() < 4 / math.sqrt(noise.numel())


@pytest.mark.parametrize("seed", [None, -1, 1 << 64])
def test_a_stochastic_format_needs_a_seed(seed: int | None) -> None:
    fmt, x = BlockFormat(8, 32, stochastic=True), torch.ones(1, 32)
    with pytest.raises(ValueError, match=rf"seed is {seed}; stochastic rounding needs one"):
        reference.encode(fmt, x, torch.empty(1, fmt.row_bytes(32), dtype=torch.uint8), seed=seed)


def test_seeds_differ_in_every_bit() -> None:
    keys = {seed_key(1 << bit) for bit in range(64)} | {seed_key(0)}
    assert len(keys) == 65


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_over_seeds_is_the_number_itself(fmt: BlockFormat, dtype: torch.dtype) -> None:
    """Each element, also the extremes of blocks, which would show a scale that clips.

    The bound is five standard errors, from the largest spread in the block, plus the rounding of fp32.
    """
    torch.manual_seed(0)
    x = torch.cat([torch.randn(4, 160), torch.randn(4, 160).exp() * torch.randn(4, 160).sign()], 1).to(dtype)
    x[:, 10] = 20  # an extreme that is positive, ...
    x[:, 70] = -20.1  # ... one that is negative, ...
    x[:, 200], x[:, 201] = 9.9, -9.9  # ... and two that tie
    seeds = 400
    samples = torch.stack([roundtrip(fmt, x.float(), seed) for seed in range(seeds)]).double()
    error = samples.mean(0) - x.double()
    spread = samples.std(0).view(4, 5, 64).amax(2, keepdim=True).expand(4, 5, 64).reshape(4, 320)
    assert (spread > 0).all()  # so the bound is not met by rounding to nearest
    assert (error.abs() <= 5 * spread / math.sqrt(seeds) + 1e-6 * x.abs().amax()).all()
    # Over all elements the mean is known better: a bias of some thousandths of a step shows.
    assert (error / spread).mean().abs() < 4 / math.sqrt(seeds * x.numel())


@given(st.sampled_from(FORMATS), SEEDS, st.integers(1, 300))
def test_zeros_stay_zero(fmt: BlockFormat, seed: int, numel: int) -> None:
    """Single zeros if not rotated, whole groups of zeros if rotated."""
    x = torch.zeros(2, numel)
    x[:, :: 1 if fmt.rotate else 3] = 0
    if not fmt.rotate:
        x[:, 1::3] = 1.5
    assert (roundtrip(fmt, x, seed)[x == 0] == 0).all()
