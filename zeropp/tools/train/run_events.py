"""What a run says about itself while it goes on, and to whom: files, terminals, TensorBoard, benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """What is known at the start."""

    config: dict[str, Any]
    """The `Run`, as plain tables."""
    parameters: int
    ranks: int
    nodes: int
    """Nodes that the model is sharded over: `ZeroPP.nodes`."""
    device: str
    versions: dict[str, str]
    first_step: int
    """1, or the step after the checkpoint that the run goes on from."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, over all ranks."""

    step: int
    loss: float
    """Mean over ranks and micro-batches, before the step."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    seconds: float
    tokens: int
    """How many this step has trained on."""
    wire_bytes: int
    """What all ranks sent."""
    across_bytes: int
    """The part of it that left a node."""
    flops_utilisation: float | None
    """Model FLOPs per second over the devices' peak; None if the peak is not known."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def across_bytes_per_second(self) -> float:
        return self.across_bytes / self.seconds


@dataclass(frozen=True)
class Evaluation:
    step: int
    validation_loss: float


@dataclass(frozen=True)
class Summary:
    """The end of a run, or of its part up to a stop."""

    step: int
    is_complete: bool
    peak_bytes: int
    """Memory of the rank that took most, after the first step; on a CPU, resident bytes over those at the
    start."""
    communication_bytes: int
    """The part of it that zeropp keeps: node shards, pending gradients and scratch buffers."""
    checkpoint: str
    """Its folder."""


class Listener:
    """Told on the first rank only. Does nothing; override what is of interest."""

    def on_start(self, info: RunInfo) -> None: ...
    def on_step(self, record: StepRecord) -> None: ...
    def on_evaluation(self, evaluation: Evaluation) -> None: ...
    def on_note(self, text: str) -> None: ...
    def on_end(self, summary: Summary) -> None: ...
    def close(self) -> None:
        """The run is over, also after an error: give up what is held."""
