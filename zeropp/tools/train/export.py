"""Export to a Hugging Face folder: config.json and safetensors, for `AutoModelForCausalLM`.

A Hugging Face model keeps its architecture. Our own GPT is saved as a Llama, which computes the same
function:

    embedding                     model.embed_tokens
    blocks.0.attention_norm       model.layers.0.input_layernorm
    blocks.0.attention.query      model.layers.0.self_attn.q_proj       (key, value, output alike)
    blocks.0.mlp_norm             model.layers.0.post_attention_layernorm
    blocks.0.mlp.gate             model.layers.0.mlp.gate_proj          (up alike; output is down_proj)
    norm                          model.norm
    head                          lm_head
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ..atomic_files import make_folder
from ..models.gpt import GPT, GPTConfig
from ..models.loading import HuggingFaceLM, build_model
from .checkpoint import read_state, read_tensors
from .config import read_run

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RENAMED = {
    "embedding.": "model.embed_tokens.",
    "blocks.": "model.layers.",
    "norm.": "model.norm.",
    "head.": "lm_head.",
}
RENAMED_IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.output": "mlp.down_proj",
}


def export(model: nn.Module, folder: Path) -> None:
    """Write `model`, sharded or not, to `folder`, which must be new or empty. Collective: every rank calls
    it, and rank 0 gathers the weights in its CPU memory and writes them."""
    if importlib.util.find_spec("transformers") is None:
        raise ModuleNotFoundError("export needs transformers; install it with: pip install 'zeropp[hf]'")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=options)  # empty on all ranks but rank 0
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    _raise_unless_new(folder)
    if isinstance(model, GPT):
        config: PreTrainedConfig = llama_config(model.config)
        weights = {llama_name(name): weight for name, weight in weights.items()}
    elif isinstance(model, HuggingFaceLM):
        config = model.model.config
        weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    else:
        raise TypeError(f"cannot export a {type(model).__name__}; expected a model made by build_model")
    _save(config, weights, folder)


def export_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Export a checkpoint of `zeropp train`, in one process without ranks."""
    _raise_unless_new(folder)
    make_folder(folder)
    run = read_run(read_state(checkpoint, "run")["run"])
    model = build_model(run.model, run.seed)
    weights = get_model_state_dict(model)
    read_tensors(checkpoint, {"model": weights})
    model.load_state_dict(weights)
    export(model, folder)


def _raise_unless_new(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; expected a new or an empty folder")


def _save(config: PreTrainedConfig, weights: dict[str, Tensor], folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # avoids a second copy of the weights
        whole = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    whole.load_state_dict(weights, assign=True)
    whole.tie_weights()
    whole.save_pretrained(folder)


def llama_config(config: GPTConfig) -> PreTrainedConfig:
    """Return the config of the Llama that computes the same function as our GPT."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        intermediate_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=config.context,
        rms_norm_eps=config.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": config.rotary_base},
        tie_word_embeddings=config.tied,
        bos_token_id=None,  # the training data has no marks of begin and end
        eos_token_id=None,
    )


def llama_name(name: str) -> str:
    """Return Llama's name of a parameter of our GPT.

    >>> llama_name("blocks.7.mlp.output.weight")
    'model.layers.7.mlp.down_proj.weight'
    """
    ours, theirs = next(pair for pair in RENAMED.items() if name.startswith(pair[0]))
    rest = name.removeprefix(ours)
    if ours == "blocks.":
        index, _, parameter = rest.partition(".")
        inside = parameter.removesuffix(".weight")
        rest = f"{index}.{RENAMED_IN_BLOCK[inside]}.weight"
    return theirs + rest
