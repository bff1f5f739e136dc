"""Gradients with outliers inside blocks, from situations of real training, for benchmarks/codecs.py.

All gradients come from backward passes of the quickstart's GPT. None is drawn from a distribution.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import quickstart  # type: ignore[import-not-found, unused-ignore]

WIDTH = 96  # not a multiple of a block, so blocks cross rows of matrices, as in most models
LOUD_CHANNEL, LOUDNESS = 17, 20.0
SPIKE = 30.0


class QuickstartTraining:
    """The quickstart's GPT with its data and optimizer."""

    def __init__(self) -> None:
        self.job = quickstart.Options(layers=4, width=WIDTH, batch=8)
        torch.manual_seed(0)
        self.model = quickstart.Gpt(self.job)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.job.learning_rate)
        self.data, _ = quickstart.load_text()
        self.generator = torch.Generator().manual_seed(0)

    def backward(self, corrupt: bool = False) -> dict[str, Tensor]:
        """Return the gradients of a batch by name. With `corrupt`, one of its sequences is random bytes."""
        tokens, targets = quickstart.sample(self.data, self.job, self.generator)
        if corrupt:
            noise = torch.randint(256, (self.job.context + 1,), generator=self.generator)
            tokens[0], targets[0] = noise[:-1], noise[1:]
        self.optimizer.zero_grad()
        self.model(tokens, targets).backward()
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.backward()
            self.optimizer.step()


def gradients_with_outliers(steps: int) -> Iterator[tuple[str, Tensor]]:
    """Yield a name and all elements in memory order, for each situation. See "Outliers" in docs/codecs.md."""
    for situation, make in SITUATIONS.items():
        gradients = make(steps)
        for kind, parts in KINDS.items():
            chosen = [g.flatten() for name, g in gradients.items() if any(part in name for part in parts)]
            yield f"{situation}: {kind}", torch.cat(chosen)


KINDS = {
    "embedding and head": ("embed", "head"),
    "matrices after a norm": ("qkv", "up"),
    "MLP's second matrices": ("down",),
}


def _trained(steps: int) -> dict[str, Tensor]:
    training = QuickstartTraining()
    training.steps(steps)
    return training.backward()


def _at_the_start(steps: int) -> dict[str, Tensor]:
    return _trained(2)


def _loud_channel(steps: int) -> dict[str, Tensor]:
    """Scale up the gain of one channel: large models learn channels with much larger activations than
    others."""
    training = QuickstartTraining()
    for module in training.model.modules():
        if isinstance(module, nn.RMSNorm):
            module.weight.data[LOUD_CHANNEL] *= LOUDNESS
    training.steps(steps)
    return training.backward()


def _corrupt(steps: int) -> dict[str, Tensor]:
    training = QuickstartTraining()
    training.steps(steps)
    return training.backward(corrupt=True)


def _spike(steps: int) -> dict[str, Tensor]:
    training = QuickstartTraining()
    training.steps(steps)
    for group in training.optimizer.param_groups:
        group["lr"] *= SPIKE
    training.steps(3)
    return training.backward()


SITUATIONS: dict[str, Callable[[int], dict[str, Tensor]]] = {
    "step 3": _at_the_start,
    "trained": _trained,
    "a loud channel": _loud_channel,
    "a corrupt sequence": _corrupt,
    "loss spike": _spike,
}
