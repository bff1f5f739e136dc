"""FSDP2 on a model: one unit per block and one for the rest, with activation checkpointing, compilation and
mixed precision."""

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
    """Build a model and shard it over `mesh`. Our own GPT is sharded on the meta device, so no rank ever
    holds the whole model. A Hugging Face model is first built on every rank as a whole."""
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
    """Shard `model` in place, block by block, and initialize the weights of a GPT on the meta device.

    Args:
        precision: "fp32"; "bf16": compute in bf16, with weights and gradient reduction in fp32; "auto": bf16
        if
            `has_fast_bf16`, else fp32.
        activation_checkpointing: store only the inputs of blocks and recompute their activations in backward.
        compile: compile each block. All blocks share the compiled code, so this takes seconds; compiling the
            whole model takes minutes.
    """
    device = torch.device(mesh.device_type)
    is_on_meta = any(parameter.is_meta for parameter in model.parameters())
    if is_on_meta and not isinstance(model, GPT):
        raise ValueError(
            f"{type(model).__name__} is on the meta device, and only our GPT can be initialized there; "
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
    if is_on_meta and isinstance(model, GPT):
        model.to_empty(device=device)
        model.reset_parameters()
    return model


def shard_blocks(model: nn.Module, blocks: Iterable[nn.Module], **options: Any) -> None:
    """Apply `fully_shard` to each block and then to `model` (all other parameters), with the same options."""
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
    """Return whether to compute in bf16. All ranks of `mesh` agree: gathers of different dtypes would
    hang."""
    if precision == "fp32":
        return False
    is_safe, why = make_bf16_safe() if mesh.device_type == "cpu" else (True, "")
    if why and os.environ.get("LOCAL_RANK", "0") == "0":  # one line per node
        logger.warning("zeropp: %s", why)
    device = torch.device(mesh.device_type)
    votes = torch.tensor([is_safe, is_safe and has_fast_bf16(device)], dtype=torch.int32, device=device)
    for dim in range(mesh.ndim):
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=mesh.get_group(dim))
    all_are_safe, all_are_fast = votes.tolist()
    if precision == "bf16" and not all_are_safe:
        why = why or "a matrix product in bf16 would crash another rank"
        raise ValueError(f"precision is 'bf16'; {why}; use 'fp32'")
    return bool(all_are_safe if precision == "bf16" else all_are_fast)


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether the device reports instructions that make bf16 matrix products faster than fp32.

    CPUs without such instructions emulate bf16, which is many times slower than fp32. AMX counts unless
    oneDNN is capped below it: see tools/amx.py.
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
