"""The ranks of a job: this rank's number and device, and small collectives.

[Note: Randomness]
`seed_step` seeds torch at the start of every step, with a hash of the run's seed, the step and the rank. So
checkpoints need no state of random generators, and a resumed run draws the same numbers as an uninterrupted
one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...process_groups import job_store

FIRST_RANK_SECONDS = 5.0
"""Time that the first rank has to report an error before another rank does."""
REPORTED_KEY = "zeropp: a rank reports an error"


@dataclass(frozen=True)
class World:
    """The ranks of the default process group, which `join_world` or another program has made."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def current(cls) -> World:
        return cls(dist.get_rank(), dist.get_world_size(), _device())

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks in one dimension."""
        return init_device_mesh(self.device.type, (self.size,))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, *values: Tensor | float) -> list[float]:
        """Return the sums over all ranks, in double precision, the same on every rank. One collective."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, *values: Tensor | float) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def broadcast_from_first(self, value: int) -> int:
        """Return the first rank's `value` on every rank."""
        tensor = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.broadcast(tensor, src=0)
        return int(tensor.item())

    def run_on_first(self, work: Callable[[], object]) -> None:
        """Run `work` on the first rank. If it fails, every rank raises, so that no rank waits for another."""
        failure: list[ValueError | OSError | None] = [None]
        if self.is_first:
            try:
                work()
            except (ValueError, OSError) as error:
                failure = [error]
        dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            raise failure[0]

    def claim_error_report(self) -> bool:
        """Return whether this rank prints its error. Exactly one rank does: the first rank, or another one if
        the first has no error within `FIRST_RANK_SECONDS`. Errors that follow from the first one are not
        printed."""
        store = job_store()
        if not self.is_first:
            with suppress(RuntimeError):  # a timeout: the first rank has no error
                store.wait([REPORTED_KEY], timedelta(seconds=FIRST_RANK_SECONDS))
        try:
            return store.add(REPORTED_KEY, 1) == 1
        except RuntimeError:  # the store is gone; two reports are better than none
            return True

    def _reduce(self, values: tuple[Tensor | float, ...], op: dist.ReduceOp.RedOpType) -> list[float]:
        parts = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in values]
        reduced = torch.stack(parts)
        dist.all_reduce(reduced, op)
        return list(reduced.tolist())


@contextmanager
def join_world(timeout_seconds: float) -> Iterator[World]:
    """Join the process group of a torchrun job, or make one of this process only. It uses NCCL on GPUs, else
    gloo."""
    timeout, device = timedelta(seconds=timeout_seconds), _device()
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"  # threads that write checkpoints communicate over gloo
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    yield World.current()
    # Not after an error: other ranks may still wait for this one, and fail when its process ends.
    dist.destroy_process_group()


def seed_step(seed: int, step: int, rank: int) -> None:
    """See [Note: Randomness]."""
    # The hash of a tuple of integers is the same in every process; that of a string is not.
    torch.manual_seed(hash((seed, step, rank)) & (2**63 - 1))


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")
