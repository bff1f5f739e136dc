"""Events of a run, and the interface of their listeners: files, terminals, TensorBoard, benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run at its start."""

    config: dict[str, Any]
    """The `RunConfig` as nested dicts."""
    parameters: int
    ranks: int
    nodes: int
    """Nodes that the model is sharded over: `ZeroPP.nodes`."""
    device: str
    versions: dict[str, str]
    first_step: int
    """1, or the step after the checkpoint at which the run resumes."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, over all ranks."""

    step: int
    loss: float
    """Mean over ranks and micro-batches, before the optimizer's update."""
    grad_norm: float
    """Norm of the gradients before clipping."""
    learning_rate: float
    seconds: float
    tokens: int
    """Tokens in the step's batch."""
    wire_bytes: int
    """Bytes sent by all ranks."""
    across_bytes: int
    """The part of `wire_bytes` that crosses nodes."""
    flops_utilisation: float | None
    """Model FLOPs per second, divided by the devices' peak; None if the peak is not known."""

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
    """The state of a run at its end, or at a stop by a signal."""

    step: int
    is_complete: bool
    peak_bytes: int
    """Peak memory after the first step, of the rank with the largest one. On a CPU: the increase of resident
    memory since the start."""
    communication_bytes: int
    """The part of it that zeropp uses: node shards, pending gradients and scratch buffers."""
    checkpoint: str
    """Folder of the last checkpoint."""


class RunListener:
    """Called on the first rank only. The methods do nothing; override some of them."""

    def on_start(self, info: RunInfo) -> None: ...
    def on_step(self, record: StepRecord) -> None: ...
    def on_evaluation(self, evaluation: Evaluation) -> None: ...
    def on_note(self, text: str) -> None: ...
    def on_end(self, summary: Summary) -> None: ...
    def close(self) -> None:
        """Release resources. Called at the end of the run, also after an error."""
