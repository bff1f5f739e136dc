from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zeropp.tools.train.data import DataConfig, Loader

WORLDS, BATCHES = st.integers(1, 5), st.integers(1, 4)


def numbered(folder: Path, tokens: int) -> DataConfig:
    """Tokens that equal their position: 0, 1, 2 ..."""
    path = folder / f"{tokens}.npy"
    if not path.exists():
        np.save(path, np.arange(tokens, dtype=np.uint16))
    return DataConfig(str(path), validation_fraction=0.25, vocab_size=tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def loaders(config: DataConfig, world: int, batch: int, sequence: int = 4, seed: int = 0) -> list[Loader]:
    return [
        Loader(config, rank=rank, world=world, sequence=sequence, batch=batch, seed=seed)
        for rank in range(world)
    ]


def starts(batches: Iterable[tuple[Tensor, Tensor]]) -> list[int]:
    """Check that batches are windows of the numbered tokens, and return the first token of each sample."""
    firsts: list[int] = []
    for tokens, targets in batches:
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(tokens.shape[1]))
        assert torch.equal(targets, tokens + 1)
        firsts += tokens[:, 0].tolist()
    return firsts


def global_order(world_of_loaders: list[Loader], batches: int) -> list[int]:
    """Return the first tokens of samples in the global order of all ranks."""
    return [first for _ in range(batches) for loader in world_of_loaders for first in starts([loader.next()])]


@given(tokens=st.integers(40, 400), world=WORLDS, batch=BATCHES, seed=st.integers(0, 3))
def test_an_epoch_visits_every_sample_once(
    folder: Path, tokens: int, world: int, batch: int, seed: int
) -> None:
    ranks = loaders(numbered(folder, tokens), world, batch, seed=seed)
    samples = ranks[0].samples
    steps = -(-2 * samples // (world * batch))  # two epochs, rounded up to whole batches
    order = global_order(ranks, steps)
    every = [4 * n for n in range((int(tokens * 0.75) - 1) // 4)]
    assert sorted(order[:samples]) == every
    assert sorted(order[samples : 2 * samples]) == every
    if samples > 12:
        assert order[:samples] != order[samples : 2 * samples]  # another order per epoch
        assert order[:samples] != every


@given(
    world=WORLDS,
    batch=BATCHES,
    new_world=WORLDS,
    new_batch=BATCHES,
    before=st.integers(0, 20),
    after=st.integers(0, 20),
)
def test_a_resumed_run_continues_the_global_order_on_any_number_of_ranks(
    folder: Path, world: int, batch: int, new_world: int, new_batch: int, before: int, after: int
) -> None:
    config = numbered(folder, 200)
    first = loaders(config, world, batch)
    order = global_order(first, before)
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states)
    second = loaders(config, new_world, new_batch)
    for loader in second:
        loader.load_state_dict(states[0])
    order += global_order(second, after)
    assert order == global_order(loaders(config, 1, 1), len(order))


@given(world=WORLDS, batch=BATCHES, batches=st.integers(1, 6), trained=st.integers(0, 3))
def test_validation_is_fixed_and_never_trained_on(
    folder: Path, world: int, batch: int, batches: int, trained: int
) -> None:
    ranks = loaders(numbered(folder, 200), world, batch)
    held_out = [starts(loader.validation(batches)) for loader in ranks]
    global_order(ranks, trained)
    assert [starts(loader.validation(batches)) for loader in ranks] == held_out
    together = [first for part in held_out for first in part]
    assert len(together) == world * batch * batches
    assert min(together) == 150  # training text ends at 149
    assert max(together) <= 195
    if len(together) < 46:
        assert max(Counter(together).values()) == 1


def test_training_never_reads_held_out_text(folder: Path) -> None:
    (loader,) = loaders(numbered(folder, 200), 1, 1)
    last_targets = [int(loader.next()[1].max()) for _ in range(loader.samples)]
    assert max(last_targets) < 150


def test_seeds_differ(folder: Path) -> None:
    config = numbered(folder, 400)
    first, again, other = (global_order(loaders(config, 1, 1, seed=seed), 70) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, "has data with seed 0, this run has seed 1"),
        ({"sequence": 5}, "has data with sequence 4, this run has sequence 5"),
        ({"tokens": 240}, "has data with training_tokens 150, this run has training_tokens 180"),
    ],
)
def test_a_state_of_other_data_is_refused(folder: Path, changed: dict[str, int], message: str) -> None:
    state = loaders(numbered(folder, 200), 1, 2)[0].state_dict()
    arguments: dict[str, Any] = {"seed": 0, "sequence": 4} | changed
    (loader,) = loaders(numbered(folder, arguments.pop("tokens", 200)), 1, 2, **arguments)
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict(state)
    assert loader.state_dict()["consumed"] == 0


def test_the_vocabulary_is_found_or_checked(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.array([5, 70_000] * 100, dtype=np.uint32))
    path = str(tmp_path / "tokens.npy")
    assert loaders(DataConfig(path), 1, 1)[0].vocab_size == 70_001
    (declared,) = loaders(DataConfig(path, vocab_size=50_304), 1, 1)
    with pytest.raises(ValueError, match="has token id 70000; expected 0 to 50303: correct the data"):
        declared.next()
    np.save(path, np.array([5, -1] * 100, dtype=np.int64))
    with pytest.raises(ValueError, match="has token id -1; expected 0 to 5"):
        loaders(DataConfig(path), 1, 1)[0].next()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequence": 60}, "150 tokens for training and 50 for validation; each must be more than .* 60"),
        ({"rank": 2, "world": 2}, "rank 2 of 2"),
        ({"batch": 0}, "batch 0"),
    ],
)
def test_bad_sizes_are_refused(folder: Path, arguments: dict[str, int], message: str) -> None:
    given_arguments: dict[str, Any] = {
        "rank": 0,
        "world": 1,
        "sequence": 4,
        "batch": 1,
        "seed": 0,
    } | arguments
    with pytest.raises(ValueError, match=message):
        Loader(numbered(folder, 200), **given_arguments)


def test_text_is_bytes_and_needs_no_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text" * 20)
    path = str(tmp_path / "text.txt")
    assert loaders(DataConfig(path), 1, 1)[0].vocab_size == 256
    with pytest.raises(ValueError, match=r"vocab_size is 300, but '.*text.txt' is text"):
        loaders(DataConfig(path, vocab_size=300), 1, 1)
    with pytest.raises(ValueError, match="vocab_size is 0; expected at least 1"):
        DataConfig(vocab_size=0)


def test_a_split_without_training_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"validation_fraction is 1.0; expected more than 0 and less than 1"):
        DataConfig(validation_fraction=1.0)
