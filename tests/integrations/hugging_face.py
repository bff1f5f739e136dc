"""Helpers for tests of Hugging Face's frameworks: a small Llama, with or without LoRA, and an Accelerator
that shards on CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.integrations.environment import set_environment

VOCABULARY = 128
LAYER = "LlamaDecoderLayer"


def make_llama(dtype: torch.dtype = torch.float32, hidden: int = 64, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return model.to(dtype)  # type: ignore[no-any-return]


def with_lora(model: nn.Module, rank: int = 8, **options: Any) -> nn.Module:
    """Add PEFT's adapters to all linear layers, in fp32."""
    torch.manual_seed(1)
    config = LoraConfig(r=rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    return get_peft_model(model, config)


def tokens(step: int, sequences: int = 2, length: int = 16) -> Tensor:
    """Return this rank's data."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(0, VOCABULARY, (sequences, length), generator=generator)


def make_accelerator(**options: Any) -> Accelerator:
    """Return an Accelerator that shards with FSDP2 on CPU."""
    forget_accelerators()
    accelerator = Accelerator(cpu=True, **options)
    shard_on_cpu(accelerator)
    return accelerator


def forget_accelerators() -> None:
    """Reset Accelerate's global state to that of a new process."""
    set_environment()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def shard_on_cpu(accelerator: Accelerator) -> None:
    """Change Accelerate's state to FSDP, because Accelerate refuses to shard on CPU."""
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LAYER],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        shared["distributed_type"] = DistributedType.FSDP
