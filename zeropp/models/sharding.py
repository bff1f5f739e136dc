"""FSDP2 on a model: one unit per block and one for the rest, with checkpointing, compilation and
precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .gpt import GPT
from .loading import ModelConfig, Precision, blocks_of, build_model


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
    bf16 = precision == "bf16" or (precision == "auto" and is_good_at_bf16(device))
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if bf16
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


def is_good_at_bf16(device: torch.device) -> bool:
    """Whether matrix products in bf16 are faster than in fp32, by what the device says of itself.

    CPUs without instructions for bf16 emulate it, many times slower than fp32.
    """
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "sve_bf16"))
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "xpu":
        return bool(torch.xpu.is_bf16_supported(including_emulation=False))
    return False
