"""What the benchmark trains: a small GPT on the source code of Python's standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

VOCABULARY = 256
HEAD_WIDTH = 64


@dataclass(frozen=True)
class Workload:
    """Size of the model and of what it sees; the default has 6.6M parameters.

    Few tokens make a step of nothing but communication, which no link rate can turn into a regime."""

    layers: int = 2
    width: int = 512
    """A multiple of 64, the width of an attention head."""
    context: int = 128
    """Bytes of a sequence."""
    batch: int = 12
    """Sequences per rank and micro-batch."""
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "context", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a positive number")
        if self.width < HEAD_WIDTH or self.width % HEAD_WIDTH:
            raise ValueError(f"width is {self.width!r}; expected a multiple of {HEAD_WIDTH}")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return torch.add(x, self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, workload.width)
        self.position = nn.Parameter(torch.randn(workload.context, workload.width) * 0.02)
        self.blocks = nn.ModuleList(Block(workload.width) for _ in range(workload.layers))
        self.norm = nn.RMSNorm(workload.width)
        self.head = nn.Linear(workload.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Data:
    """Endless batches of one rank, the same for every strategy of the benchmark."""

    def __init__(self, workload: Workload, rank: int) -> None:
        self._workload = workload
        self._generator = torch.Generator().manual_seed(1000 * workload.seed + rank)
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files[:80])
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def next(self) -> tuple[Tensor, Tensor]:
        """tokens and targets, [batch, context] each."""
        length = self._workload.context + 1
        starts = torch.randint(
            len(self._text) - length, (self._workload.batch,), generator=self._generator
        ).tolist()
        sequences = torch.stack([self._text[start : start + length] for start in starts])
        return sequences[:, :-1], sequences[:, 1:]
