from __future__ import annotations

import time

import torch
import torch.distributed as dist

from tests.ranks import Ranks
from zeropp.doctor.meter import Meter


def times() -> tuple[float, float, float, int]:
    """Rank 1 is slow; and how often something was called."""
    calls: list[int] = []

    def run() -> None:
        calls.append(1)
        time.sleep(0.05 * dist.get_rank())

    meter = Meter(torch.device("cpu"), repeats=3)
    together = meter.seconds(run, round_seconds=0.2)
    return together, meter.seconds_alone(run, calls=2), meter.mean(float(dist.get_rank())), len(calls)


def test_the_slowest_rank_decides_and_all_ranks_agree(ranks: Ranks) -> None:
    first, second = ranks.run(times, world=2)
    assert first[:3] == second[:3]
    assert first[0] >= 0.05
    assert first[1] < first[0]
    assert first[2] == 0.5
    in_rounds = second[3] - 2  # after a warm-up, and one to see how many a round needs
    assert in_rounds % 3 == 0
    assert in_rounds >= 3 * 2  # rounds of several calls, by the slowest rank's time
    assert first[3] - second[3] == 3 * 2  # rank 0 also alone


def slow_in_turns() -> float:
    """Each of three ranks is slow in one of three rounds."""
    calls: list[int] = []

    def run() -> None:
        calls.append(1)
        time.sleep(0.05 * (len(calls) % 3 == dist.get_rank()))

    return Meter(torch.device("cpu"), repeats=3).seconds(run)


def test_in_every_round_the_slowest_rank_decides(ranks: Ranks) -> None:
    assert min(ranks.run(slow_in_turns, world=3)) >= 0.05
