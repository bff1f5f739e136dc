"""The subject of a plan: a model, the ranks that train it, and the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .models import Model, PlanError

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Scenario:
    """A model, the ranks that train it, and the batch."""

    model: Model
    nodes: int
    ranks_per_node: int
    micro_batch: int = 1
    """Sequences per rank and micro-batch."""
    sequence: int = 512
    """Tokens per sequence."""
    micro_batches: int = 1
    """Backward passes per optimizer step."""
    compute: Precision = "bf16"
    """Dtype of gathered weights and of compute. Shards and optimizer state have the model's dtype."""
    reduce: Precision = "bf16"
    """Dtype of the gradients that FSDP2 passes to a reduction."""
    checkpointing: bool = False
    """Save only the inputs of each layer, and compute the layer again in backward."""

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "micro_batch", "sequence", "micro_batches"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise PlanError(f"{name} is {value!r}; expected a positive number")
        for name in ("compute", "reduce"):
            value, choices = getattr(self, name), get_args(Precision)
            if value not in choices:
                raise PlanError(f"{name} is {value!r}; expected one of {', '.join(choices)}")
        if self.world_size < 2:
            raise PlanError(
                "nodes x ranks_per_node is 1; expected two or more, because one rank sends nothing"
            )

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def tokens(self) -> int:
        """Tokens that a rank reads in a step."""
        return self.micro_batch * self.sequence * self.micro_batches
