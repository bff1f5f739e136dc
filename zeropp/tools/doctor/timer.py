"""Times of calls that all ranks make at the same time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

LONG_ROUND = 0.1
"""Seconds of a long round. Ranks that share a core get it in turns of some milliseconds, and a call that is
shorter than a turn seems as fast as on an exclusive core."""


class Timer:
    """Times calls on all ranks at once. The slowest rank determines each round, as in training."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def seconds(self, run: Callable[[], object], round_seconds: float = 0.0) -> float:
        """Return the seconds of one call: the median of several rounds.

        A round has one call, or as many calls as take `round_seconds`. Calls that only compute need long
        rounds: see `LONG_ROUND`."""
        run()  # a warm-up: the first call may compile
        calls = 1
        if round_seconds:
            calls += int(round_seconds / self.largest(self.timed(run)))  # the same number on every rank
        rounds = []
        for _ in range(self.repeats):
            dist.barrier()
            rounds.append(self.timed(run, calls))
        return statistics.median(self._reduce(rounds, dist.ReduceOp.MAX))

    def seconds_alone(self, run: Callable[[], object], calls: int) -> float:
        """Return the seconds of one call on rank 0, while the other ranks wait."""
        dist.barrier()
        return self.largest(self.fastest(run, calls) if dist.get_rank() == 0 else 0.0)

    def fastest(self, run: Callable[[], object], calls: int = 1) -> float:
        """Return the seconds of one call on this rank: the best of several rounds."""
        return min(self.timed(run, calls) for _ in range(self.repeats))

    def timed(self, run: Callable[[], object], calls: int = 1) -> float:
        """Return the seconds of one call on this rank: the mean of one round."""
        start = time.perf_counter()
        for _ in range(calls):
            run()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return (time.perf_counter() - start) / calls

    def largest(self, value: float) -> float:
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def mean(self, value: float) -> float:
        return self._reduce([value], dist.ReduceOp.SUM)[0] / dist.get_world_size()

    def _reduce(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        """Reduce each value over all ranks."""
        reduced = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(reduced, op)
        found: list[float] = reduced.tolist()
        return found
