"""The test harness itself: a failing or hanging rank must fail the test, soon."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, Ranks


def _sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def _fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one says no")
    dist.barrier()


def _hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def test_worlds_of_several_sizes(ranks: Ranks) -> None:
    for world in (1, 2, 6):
        assert ranks.run(_sum_of_ranks, world=world) == [world * (world - 1) / 2] * world


def test_failure_and_hang_are_reported_and_survived(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="rank one says no"):
        ranks.run(_fail_on_one, world=2, grace=1)
    ranks.run(_sum_of_ranks, world=2)
    with pytest.raises(RankError, match=r"no answer from ranks \[1\]"):
        ranks.run(_hang_on_one, world=2, timeout=2)
    assert ranks.run(_sum_of_ranks, world=2) == [1.0, 1.0]
