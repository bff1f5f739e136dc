"""Model and data of the benchmark: a small GPT on the bytes of Python's standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ..models.gpt import GPT, GPTConfig

HEAD_WIDTH = 64


@dataclass(frozen=True)
class Workload:
    """Size of the model and of its batches. The default has 6.6M parameters.

    With too few tokens a step is nearly all communication, and no link rate can reach a regime's share.
    """

    layers: int = 2
    width: int = 512
    """A multiple of 64, the width of an attention head."""
    context: int = 128
    """Bytes per sequence."""
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

    def build_model(self) -> GPT:
        """Build the whole model, with the same weights on every rank."""
        config = GPTConfig(
            layers=self.layers,
            width=self.width,
            heads=self.width // HEAD_WIDTH,
            context=self.context,
            norm_epsilon=torch.finfo(torch.float32).eps,
            architecture="gpt2",
        )
        return GPT(config, self.seed)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Create a fused AdamW, which `zeropp train` and the planner use, too."""
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, fused=True)

    @property
    def first_and_last_share(self) -> float:
        """Share of the parameters in the root unit and the first block. Their gathers precede all compute,
        and their reductions follow it."""
        with torch.device("meta"):
            model = self.build_model()
        others = sum(p.numel() for block in list(model.blocks)[1:] for p in block.parameters())
        return 1 - others / sum(p.numel() for p in model.parameters())


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of the next bytes. Logits are [batch, context, 256], targets [batch, context]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Data:
    """Endless batches of one rank, the same for every strategy."""

    def __init__(self, workload: Workload, rank: int) -> None:
        self._workload = workload
        self._generator = torch.Generator().manual_seed(1000 * workload.seed + rank)
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files[:80])
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def next(self) -> tuple[Tensor, Tensor]:
        """Return tokens and targets, [batch, context] each."""
        length = self._workload.context + 1
        starts = torch.randint(
            len(self._text) - length, (self._workload.batch,), generator=self._generator
        ).tolist()
        sequences = torch.stack([self._text[start : start + length] for start in starts])
        return sequences[:, :-1], sequences[:, 1:]
