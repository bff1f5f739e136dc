"""The test harness itself: a failing or hanging rank must fail the test, soon."""

import os
import signal
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


def _die_on_one(number: int) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    dist.barrier()


def test_worlds_of_several_sizes(ranks: Ranks) -> None:
    for world in (1, 2, 6):
        assert ranks.run(_sum_of_ranks, world=world) == [world * (world - 1) / 2] * world


def test_failure_and_hang_are_reported_and_survived(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="rank one says no"):
        ranks.run(_fail_on_one, world=2, grace=1)
    ranks.run(_sum_of_ranks, world=2)
    with pytest.raises(RankError, match=r"no answer from ranks \[(0, )?1\]"):  # rank 0 may be slow to start
        ranks.run(_hang_on_one, world=2, timeout=5)
    assert ranks.run(_sum_of_ranks, world=2) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("number", "how", "advice"),
    [
        (signal.SIGILL, r"SIGILL \(illegal instruction\)", "Try: set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"),
        (signal.SIGBUS, r"SIGBUS \(bus error\)", "Try: check whether /dev/shm is full"),
        (signal.SIGKILL, r"SIGKILL \(killed\)", "Try: look for 'out of memory'"),
    ],
)
def test_a_rank_that_a_signal_ends_says_which_and_where(
    ranks: Ranks, number: int, how: str, advice: str
) -> None:
    where = "" if number == signal.SIGKILL else "in _die_on_one.*"  # which no handler sees
    with pytest.raises(RankError, match=rf"(?s)rank 1 was ended by {how}\n.*{where}{advice}"):
        ranks.run(_die_on_one, number, world=2)
    assert ranks.run(_sum_of_ranks, world=2) == [1.0, 1.0]
