"""Requests of the benchmark process to its ranks, and their answers. Connections pickle them."""

from __future__ import annotations

from dataclasses import dataclass

from ..strategies import Strategy
from .workload import Workload


@dataclass(frozen=True)
class Build:
    """Replaces the model by a new one. Answer: `Built`."""

    strategy: Strategy
    workload: Workload


@dataclass(frozen=True)
class Built:
    parameters: int
    """Number of parameters of the whole model."""


@dataclass(frozen=True)
class TakeSteps:
    """Takes some optimizer steps. Answer: `Steps`."""

    count: int
    micro_batches: int
    """Micro-batches per step."""


@dataclass(frozen=True)
class Steps:
    """Some optimizer steps on one rank. Bytes and CPU time are sums over all steps."""

    seconds: list[float]
    losses: list[float]
    tx_bytes: int
    """Bytes that the rank's node has sent."""
    rx_bytes: int
    """Bytes that the rank's node has received."""
    ledger_bytes: int | None
    """Bytes that the rank has sent to other nodes, from its ledger. None: no ledger."""
    cpu_seconds: float
    """CPU time of the rank, including gloo's threads."""
    phase_bytes: list[int]
    """Bytes that the rank has sent to other nodes in each phase of the last step. Empty if unknown."""


@dataclass(frozen=True)
class Choose:
    """Takes steps until `apply(model, "auto")` has chosen a Config. Answer: `Chosen`."""

    micro_batches: int


@dataclass(frozen=True)
class Chosen:
    """The choice of `apply(model, "auto")`."""

    name: str


@dataclass(frozen=True)
class ReadMemory:
    """Reads the memory that the model has taken since it was built. Answer: `Memory`."""


@dataclass(frozen=True)
class Memory:
    """Memory of one rank in bytes."""

    peak_bytes: int
    model_state_bytes: int
    communication_bytes: int


@dataclass(frozen=True)
class ProfileStep:
    """Takes one optimizer step with a profiler. Answer: `ProfiledStep`."""

    micro_batches: int


@dataclass(frozen=True)
class ProfiledStep:
    """Time of one profiled step."""

    parts_ms: dict[str, float]
    """Milliseconds of each of `profile.PARTS`."""


@dataclass(frozen=True)
class Failure:
    """Answer to a request that has raised an exception."""

    traceback: str


Request = Build | TakeSteps | Choose | ReadMemory | ProfileStep
Answer = Built | Steps | Chosen | Memory | ProfiledStep
