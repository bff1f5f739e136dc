"""Small models, our own and Hugging Face's, and tokens for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeropp.tools.models.loading import ModelConfig

VOCABULARY, CONTEXT = 50, 16
SMALL = ModelConfig(
    "tiny", layers=3, width=48, heads=3, context=CONTEXT, vocab_size=VOCABULARY, precision="fp32"
)

# Contents of config.json. The models have no tokens for begin and end: their ids are beyond this small
# vocabulary.
HF_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "gpt2": {  # its head is the embedding
        "vocab_size": VOCABULARY,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 3,
        "n_positions": CONTEXT,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "mixtral": {  # experts
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}


def hugging_face(kind: str, folder: Path) -> ModelConfig:
    """Write a config.json to `folder` and return the config of its model."""
    (folder / kind).mkdir()
    (folder / kind / "config.json").write_text(json.dumps({"model_type": kind} | HF_CONFIGS[kind]))
    return ModelConfig(f"hf:{folder / kind}", precision="fp32")


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, CONTEXT), generator=torch.Generator().manual_seed(0))
