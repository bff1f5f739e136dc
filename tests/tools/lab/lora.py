"""Layers with adapters, for steps.py. As in PEFT, adapters are in the same units as the frozen base."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, RANK = 512, 32


class Adapted(nn.Module):
    """A frozen linear layer in `dtype` with an adapter in fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype).requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        base, adapter = self.base(x), self.up(self.down(x.float()))
        return base + adapter.to(base.dtype)  # type: ignore[no-any-return]


class Lora(nn.Module):
    """Two units of four layers, and a frozen root unit."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(*(Adapted(dtype) for _ in range(4))) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH, dtype=dtype).requires_grad_(False)
        self.blocks = list(self.layers)
        self.dtype = dtype

    def loss(self, generator: torch.Generator) -> Tensor:
        x = torch.randn(16, WIDTH, generator=generator).to(self.dtype)
        return (self(x) - x).float().square().mean()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]
