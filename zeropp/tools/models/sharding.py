"""FSDP2 on a model: one unit per block and one for the rest, with checkpointing, compilation and
precision."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ..amx import CAP_VARIABLE, make_bf16_safe
from .gpt import GPT
from .loading import ModelConfig, Precision, blocks_of, build_model

logger = logging.getLogger("zeropp")


def build_sharded(config: ModelConfig, seed: int, mesh: DeviceMesh) -> nn.Module:
    """The model of a run, sharded over `mesh`. Our own GPT is sharded before it has weights, so that no
    rank ever holds it whole; a Hugging Face model is built whole on every rank first."""
    return shard(
        build_model(config, seed, device="meta" if config.hugging_face is None else "cpu"),
        mesh,
        precision=config.precision,
        activation_checkpointing=config.activation_checkpointing,
        compile=config.compile,
    )


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    precision: Precision = "auto",
    activation_checkpointing: bool = False,
    compile: bool = False,
) -> nn.Module:
    """Shard `model` in place, block by block. A GPT on the meta device gets its weights here.

    precision: "fp32"; "bf16": compute in bf16, keep weights and reduce gradients in fp32; "auto": bf16 where
        `is_good_at_bf16` says so.
    activation_checkpointing: keep only the inputs of blocks and compute the rest again in backward.
    compile: compile each block (all blocks share the code), which takes seconds where a whole model takes
    minutes.
    """
    device = torch.device(mesh.device_type)
    has_no_weights = any(parameter.is_meta for parameter in model.parameters())
    if has_no_weights and not isinstance(model, GPT):
        raise ValueError(
            f"{type(model).__name__} is on the meta device and only our GPT can fill in its weights; "
            "build it on the CPU"
        )
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if _computes_in_bf16(precision, mesh)
        else MixedPrecisionPolicy()
    )
    if activation_checkpointing:
        _checkpoint_blocks(model)
    blocks = blocks_of(model)
    if compile:
        for block in blocks:
            block.compile()
    shard_blocks(model, blocks, mesh=mesh, mp_policy=policy)
    if has_no_weights and isinstance(model, GPT):
        model.to_empty(device=device)
        model.reset_parameters()
    return model


def shard_blocks(model: nn.Module, blocks: Iterable[nn.Module], **options: Any) -> None:
    """Make each block a unit, and then one of what is left: `fully_shard` with the same options for all."""
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def _checkpoint_blocks(model: nn.Module) -> None:
    blocks = set(blocks_of(model))
    owners = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for owner in owners:
        for name, child in owner.named_children():
            if child in blocks:
                setattr(owner, name, checkpoint_wrapper(child))


def _computes_in_bf16(precision: Precision, mesh: DeviceMesh) -> bool:
    """The same answer on every rank of `mesh`: ranks that gather different dtypes would never meet."""
    if precision == "fp32":
        return False
    is_safe, why = make_bf16_safe() if mesh.device_type == "cpu" else (True, "")
    if why and os.environ.get("LOCAL_RANK", "0") == "0":  # one line per node
        logger.warning("zeropp: %s", why)
    device = torch.device(mesh.device_type)
    votes = torch.tensor([is_safe, is_safe and is_good_at_bf16(device)], dtype=torch.int32, device=device)
    for dim in range(mesh.ndim):
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=mesh.get_group(dim))
    all_are_safe, all_are_good = votes.tolist()
    if precision == "bf16" and not all_are_safe:
        why = why or "a product in bf16 ends the process on another rank"
        raise ValueError(f"precision is 'bf16'; {why}; use 'fp32'")
    return bool(all_are_safe if precision == "bf16" else all_are_good)


def is_good_at_bf16(device: torch.device) -> bool:
    """Whether matrix products in bf16 are faster than in fp32, by what the device says of itself.

    CPUs without instructions for bf16 emulate it, many times slower than fp32. AMX counts unless oneDNN is
    capped below it: see tools/amx.py.
    """
    if device.type == "cpu":
        names = ["avx512_bf16", "sve_bf16"]
        if CAP_VARIABLE not in os.environ:
            names.append("amx_bf16")
        return any(torch.cpu.get_capabilities().get(name, False) for name in names)
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "xpu":
        return bool(torch.xpu.is_bf16_supported(including_emulation=False))
    return False
