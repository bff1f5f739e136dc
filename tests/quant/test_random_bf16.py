"""fp32 to bf16 at random gives one of the two neighbours, exact in the mean, from one seed the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zeropp.quant import random_bf16
from zeropp.quant.random_bf16 import round_at_random

SEEDS = 512


def rounded(x: Tensor, seed: int = 0, offset: int = 0) -> Tensor:
    out = torch.empty_like(x, dtype=torch.bfloat16)
    round_at_random(x, out, seed, offset)
    return out


def test_a_neighbour_and_the_mean() -> None:
    x = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 500)
    below = (x.view(torch.int32) & -0x10000).view(torch.float32)
    above = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    total = torch.zeros_like(x, dtype=torch.float64)
    for seed in range(SEEDS):
        found = rounded(x, seed).float()
        assert ((found == below) | (found == above)).all()
        total += found
    step = (above - below).abs().double()
    error = (total / SEEDS - x).abs() / step
    assert error.max() < 5 * 0.5 / SEEDS**0.5  # five standard errors, where they are largest
    assert ((total / SEEDS - x) / step).mean().abs() < 4 * 0.5 / (SEEDS * x.numel()) ** 0.5


def test_bf16_numbers_stay_exact() -> None:
    special = torch.tensor([[0.0, -0.0, 1.0, -3.5, torch.inf, -torch.inf, 2.0**-126]])
    assert torch.equal(rounded(special).float(), special)
    payload = torch.tensor([[0x7F800001, 0x7FFFFFFF, -1]], dtype=torch.int32).view(torch.float32)
    assert rounded(payload).isnan().all()


def test_small_addends_are_not_lost() -> None:
    """1 + 4096 times 2^-12 is 2; rounded to nearest, it stays 1."""
    sums = torch.ones(1, 4096).bfloat16()
    for seed in range(4096):
        round_at_random(sums.float() + 2.0**-12, sums, seed)
    assert sums.float().mean().item() == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("columns", [1, 127, 128, 1000])
def test_pieces_give_the_bits_of_the_whole(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, columns)
    whole = rounded(x, 7)
    assert torch.equal(rounded(x[:, 128:], 7, 128), whole[:, 128:])
    monkeypatch.setattr(random_bf16, "PIECE", 3 * 256)
    assert torch.equal(rounded(x, 7), whole)
    assert columns < 100 or not torch.equal(rounded(x, 8), whole)
