"""What a row of the benchmark asks of FSDP2: how to shard, and what to put off to the last micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from ..handle import ZeroPP
from .rows import Row


def sharding_options(row: Row, ranks_per_node: int) -> dict[str, Any]:
    """Options of `fully_shard`."""
    options: dict[str, Any] = {}
    if row.is_hsdp:
        shape = (dist.get_world_size() // ranks_per_node, ranks_per_node)
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    if row.reshard_in_node:
        options["reshard_after_forward"] = ranks_per_node
    return options


def sync_switch(row: Row, model: nn.Module, zpp: ZeroPP | None) -> Callable[[bool], object]:
    """To be called before each micro-batch with whether it is the last one of the step."""
    assert isinstance(model, FSDPModule)
    if row.sync == "gradients":
        return model.set_requires_gradient_sync
    if row.sync == "replicas":
        return model.set_requires_all_reduce
    if row.sync == "across" and zpp is not None:
        return zpp.set_requires_cross_node_sync
    return lambda _: None
