from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks
from zeropp.tools.doctor import timer
from zeropp.tools.doctor.timer import Timer


class Clock:
    """A clock that only `sleep` advances, whatever the load of the machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def times() -> tuple[float, float, float, int]:
    """Return the times of a call that is slow on rank 1, a mean, and the number of calls."""
    calls: list[int] = []
    clock = Clock()

    def run() -> None:
        calls.append(1)
        clock.sleep(0.05 * dist.get_rank())

    with patch.object(timer, "time", SimpleNamespace(perf_counter=lambda: clock.now)):
        on_cpu = Timer(torch.device("cpu"), repeats=3)
        together = on_cpu.seconds(run, round_seconds=0.22)
        alone = on_cpu.seconds_alone(run, calls=2)
    return together, alone, on_cpu.mean(float(dist.get_rank())), len(calls)


def test_the_slowest_rank_decides_and_all_ranks_agree(ranks: Ranks) -> None:
    first, second = ranks.run(times, world=2)
    assert first[:3] == second[:3] == (pytest.approx(0.05), 0.0, 0.5)
    # After a warm-up and a trial call, a round has as many calls as take 0.22 s on the slowest rank.
    assert second[3] - 2 == 3 * 5
    assert first[3] - second[3] == 3 * 2  # rank 0 also alone


def slow_in_turns() -> float:
    """Each of three ranks is slow in one of three rounds."""
    calls: list[int] = []
    clock = Clock()

    def run() -> None:
        calls.append(1)
        clock.sleep(0.05 * (len(calls) % 3 == dist.get_rank()))

    with patch.object(timer, "time", SimpleNamespace(perf_counter=lambda: clock.now)):
        return Timer(torch.device("cpu"), repeats=3).seconds(run)


def test_in_every_round_the_slowest_rank_decides(ranks: Ranks) -> None:
    assert ranks.run(slow_in_turns, world=3) == [pytest.approx(0.05)] * 3
