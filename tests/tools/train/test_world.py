"""Collectives of a world, and seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import HANG_SECONDS, Ranks
from zeropp.tools.train.world import World, join_world, seed_step


def agree() -> tuple[list[float], list[float], int]:
    world = World.current()
    return (
        world.sum(world.rank, torch.tensor(0.5)),
        world.max(world.rank, -world.rank),
        world.broadcast_from_first(7 + world.rank),
    )


def test_all_ranks_get_the_same_sums(ranks: Ranks) -> None:
    assert ranks.run(agree, world=3) == [([3.0, 1.5], [2.0, 0.0], 7)] * 3


def share_work(path: Path) -> str:
    """Run work on the first rank. The second piece of work fails: it makes a folder where a file is."""
    world, done = World.current(), []
    world.run_on_first(lambda: done.append(1))
    assert done == [1] * world.is_first
    with pytest.raises(FileExistsError) as error:
        world.run_on_first(path.mkdir)
    return str(error.value)


def test_an_error_on_the_first_rank_is_raised_on_all(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert ranks.run(share_work, path, world=3) == [f"[Errno 17] File exists: '{path}'"] * 3


def test_a_process_without_torchrun_is_a_world_of_one_rank() -> None:
    with join_world(timeout_seconds=HANG_SECONDS) as world:
        assert (world.rank, world.size, world.device.type) == (0, 1, "cpu")
        assert world.sum(2.0) == [2.0]
    assert not torch.distributed.is_initialized()


def test_random_numbers_follow_from_seed_step_and_rank() -> None:
    def draw(seed: int, step: int, rank: int) -> float:
        seed_step(seed, step, rank)
        return torch.rand(()).item()

    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert len({draw(seed, step, rank) for seed in (0, 1) for step in (1, 2) for rank in (0, 1)}) == 8
