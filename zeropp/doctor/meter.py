"""Time, as ranks see it that do the same at the same time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


class Meter:
    """Times things on all ranks at once; the slowest rank decides, as in training."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def seconds(self, run: Callable[[], object], calls: int = 1) -> float:
        """Seconds of one call: the median of several rounds of `calls`."""
        run()
        rounds = []
        for _ in range(self.repeats):
            dist.barrier()
            rounds.append(self.timed(run, calls))
        return self.largest(statistics.median(rounds))

    def seconds_alone(self, run: Callable[[], object], calls: int) -> float:
        """Seconds of one call on rank 0, while the others wait."""
        dist.barrier()
        return self.largest(self.fastest(run, calls) if dist.get_rank() == 0 else 0.0)

    def fastest(self, run: Callable[[], object], calls: int = 1) -> float:
        """Seconds of one call on this rank: the best of several rounds."""
        return min(self.timed(run, calls) for _ in range(self.repeats))

    def timed(self, run: Callable[[], object], calls: int = 1) -> float:
        """Seconds of one call on this rank, now."""
        start = time.perf_counter()
        for _ in range(calls):
            run()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return (time.perf_counter() - start) / calls

    def largest(self, value: float) -> float:
        return self._reduce(value, dist.ReduceOp.MAX)

    def mean(self, value: float) -> float:
        return self._reduce(value, dist.ReduceOp.SUM) / dist.get_world_size()

    def _reduce(self, value: float, op: dist.ReduceOp.RedOpType) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, op)
        return total.item()
