"""Environment variables that frameworks read."""

from __future__ import annotations

import os

import torch.distributed as dist


def set_environment() -> None:
    """Set the variables that torchrun sets."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "1"}
