from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zeropp.tools.bench.workload import Data, Workload, loss_of
from zeropp.tools.models.loading import parameter_count

SMALL = Workload(layers=1, width=64, context=16, batch=3)


def test_the_model_of_the_published_figures_keeps_its_size() -> None:
    with torch.device("meta"):
        assert parameter_count(Workload().build_model()) == 6_621_696


def test_data_depend_on_the_seed_and_the_rank() -> None:
    tokens, targets = Data(SMALL, rank=1).next()
    assert tokens.shape == targets.shape == (3, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])  # targets are the next bytes
    assert torch.equal(tokens, Data(SMALL, rank=1).next()[0])
    assert not torch.equal(tokens, Data(SMALL, rank=0).next()[0])
    assert not torch.equal(tokens, Data(replace(SMALL, seed=1), rank=1).next()[0])


def test_the_loss_is_the_mean_over_all_tokens() -> None:
    logits = torch.zeros(3, 16, 256)
    assert loss_of(logits, torch.zeros(3, 16, dtype=torch.long)).item() == pytest.approx(8 * 0.693147)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 100}, "width is 100; expected a multiple of 64"),
        ({"layers": 0}, "layers is 0; expected a positive number"),
    ],
)
def test_invalid_sizes_are_named(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)
