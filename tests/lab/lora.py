"""A Llama with adapters, for steps.py."""

from __future__ import annotations

import torch
from torch import nn

from tests.integrations.hugging_face import LAYER, VOCABULARY, make_llama, with_lora


class Lora(nn.Module):
    """A Llama with adapters in fp32, which share their units with the frozen base."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = with_lora(make_llama(dtype, hidden=512), rank=32)
        self.blocks = [module for module in self.modules() if type(module).__name__ == LAYER]

    def loss(self, generator: torch.Generator) -> torch.Tensor:
        tokens = torch.randint(0, VOCABULARY, (1, 16), generator=generator)
        return self(tokens)  # type: ignore[no-any-return]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]
