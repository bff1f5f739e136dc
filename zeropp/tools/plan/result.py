"""A plan: the question, the predicted cost of each strategy, and the advice."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..atomic_files import write_file
from .hardware import Hardware
from .recommend import PlannedStrategy
from .sweep import Point


@dataclass(frozen=True)
class Plan:
    """Predictions for one scenario on one cluster."""

    subject: str
    """One line with the model, the ranks and the batch."""
    hardware: Hardware
    strategies: tuple[PlannedStrategy, ...]
    """With advice, the best strategy first; without, the requested one."""
    sentences: tuple[str, ...] = ()
    """The advice; empty if none was requested."""
    points: tuple[Point, ...] = ()
    """The sweep; empty if none was requested."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "hardware": asdict(self.hardware),
            "options": [_as_dict(planned) for planned in self.strategies],
            "sentences": list(self.sentences),
            "sweep": [asdict(point) for point in self.points],
        }

    def save(self, path: Path) -> None:
        write_file(path, json.dumps(self.as_dict(), indent=1) + "\n")


def _as_dict(planned: PlannedStrategy) -> dict[str, Any]:
    timeline, trace = planned.timeline, planned.timeline.trace
    return {
        "strategy": planned.strategy.name,
        "title": planned.strategy.title,
        "step_seconds": timeline.step_seconds,
        "phase_seconds": timeline.phase_seconds(),
        "busy_seconds": timeline.busy_seconds,
        "critical_seconds": timeline.critical_seconds,
        "bottleneck": timeline.bottleneck,
        "tokens_per_second": timeline.tokens_per_second,
        "tflops_per_rank": timeline.tflops,
        "parameters": trace.parameters,
        "wire_bytes": sum(hop.wire_bytes for hop in trace.hops()),
        "across_bytes": sum(hop.across_bytes for hop in trace.hops()),
        "memory_bytes": {**asdict(planned.memory), "peak": planned.memory.peak},
        "fits": planned.fits,
    }
