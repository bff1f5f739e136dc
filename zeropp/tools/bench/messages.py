"""What the bench process asks of its ranks, and what each rank answers. All of it is pickled."""

from __future__ import annotations

from dataclasses import dataclass

from ..strategies import Strategy
from .workload import Workload


@dataclass(frozen=True)
class Build:
    """Replace the model by a fresh one. Answer: `Built`."""

    strategy: Strategy
    workload: Workload


@dataclass(frozen=True)
class Built:
    parameters: int
    """How many the whole model has."""


@dataclass(frozen=True)
class TakeSteps:
    """Take some optimizer steps. Answer: `Steps`."""

    count: int
    micro_batches: int
    """How many each step has."""


@dataclass(frozen=True)
class Steps:
    """Some optimizer steps on this rank. Bytes and CPU time are those of all steps together."""

    seconds: list[float]
    losses: list[float]
    tx_bytes: int
    """Sent by this rank's node."""
    rx_bytes: int
    """Received by this rank's node."""
    ledger_bytes: int | None
    """What this rank sent to other nodes, as its ledger has it; None: no ledger."""
    cpu_seconds: float
    """What this rank took of the cores, with the threads of gloo."""
    phase_bytes: list[int]
    """What this rank sent to other nodes in each phase of the last step; empty if they are not told apart."""


@dataclass(frozen=True)
class Choose:
    """Take steps until zeropp has chosen a Config, of a strategy that leaves it to it. Answer: `Chosen`."""

    micro_batches: int


@dataclass(frozen=True)
class Chosen:
    name: str


@dataclass(frozen=True)
class ReadMemory:
    """Say how much memory the model has taken since it was built. Answer: `Memory`."""


@dataclass(frozen=True)
class Memory:
    """Bytes of this rank."""

    peak_bytes: int
    model_state_bytes: int
    communication_bytes: int


@dataclass(frozen=True)
class ProfileStep:
    """Take one optimizer step with a profiler. Answer: `ProfiledStep`."""

    micro_batches: int


@dataclass(frozen=True)
class ProfiledStep:
    parts_ms: dict[str, float]
    """Where the time of the step went: milliseconds of each of `profile.PARTS`."""


@dataclass(frozen=True)
class Failure:
    """The answer to any request that raised an exception."""

    traceback: str


Request = Build | TakeSteps | Choose | ReadMemory | ProfileStep
Answer = Built | Steps | Chosen | Memory | ProfiledStep
