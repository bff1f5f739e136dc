"""The ranks of a job: who this one is, what it computes on, and how they agree.

[Note: Randomness]
Whatever is random in a step follows from the run's seed, the step and the rank: `seed_step` is called at the
start of each. So no state of a random generator is saved, and a resumed run draws what it would have drawn.
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

FIRST_HAS_SECONDS = 5.0
"""How long other ranks wait for the first one to tell of an error."""
TOLD = "zeropp: a rank has told of an error"


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

    def first_does(self, work: Callable[[], object]) -> None:
        """Let the first rank do it. Every rank raises if it fails, so none is left waiting for others."""
        failure: list[ValueError | OSError | None] = [None]
        if self.is_first:
            try:
                work()
            except (ValueError, OSError) as error:
                failure = [error]
        dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            raise failure[0]

    def is_to_tell(self) -> bool:
        """Whether it is for this rank to tell the user of an error that it has. One rank does: the first, or,
        if it has none for some seconds, another. Ranks that fail because that one is gone stay silent."""
        store = job_store()
        if not self.is_first:
            with suppress(RuntimeError):  # the first has nothing to tell
                store.wait([TOLD], timedelta(seconds=FIRST_HAS_SECONDS))
        try:
            return store.add(TOLD, 1) == 1
        except RuntimeError:  # the store is gone: better told twice than not at all
            return True

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
