"""The ranks of a job: who this one is, what it computes on, and how they agree.

[Note: Randomness]
Whatever is random in a step follows from the run's seed, the step and the rank: `seed_step` is called at the
start of each. So no state of a random generator is saved, and a resumed run draws what it would have drawn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class World:
    """Inside `join_world`, or of a process group that somebody else made."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def current(cls) -> World:
        return cls(dist.get_rank(), dist.get_world_size(), _device())

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks in one row, to shard over."""
        return init_device_mesh(self.device.type, (self.size,))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, *values: Tensor | float) -> list[float]:
        """The sums over all ranks, in double precision. One collective, the same result on every rank."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, *values: Tensor | float) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def from_first(self, value: int) -> int:
        """What the first rank says."""
        tensor = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.broadcast(tensor, src=0)
        return int(tensor.item())

    def _reduce(self, values: tuple[Tensor | float, ...], op: dist.ReduceOp.RedOpType) -> list[float]:
        parts = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in values]
        reduced = torch.stack(parts)
        dist.all_reduce(reduced, op)
        return list(reduced.tolist())


@contextmanager
def join_world(timeout_seconds: float) -> Iterator[World]:
    """The process group of a torchrun job, or of this process alone; NCCL where there are GPUs, else gloo."""
    timeout, device = timedelta(seconds=timeout_seconds), _device()
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"  # checkpoints are written beside the training, on gloo
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    yield World.current()
    # Not after an error: other ranks may still wait for this one, and learn of it when the process ends.
    dist.destroy_process_group()


def seed_step(seed: int, step: int, rank: int) -> None:
    """See [Note: Randomness]."""
    torch.manual_seed(hash((seed, step, rank)) & (2**63 - 1))  # of integers: the same in every process


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")
