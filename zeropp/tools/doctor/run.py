"""The whole visit: every part that was asked for, in order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..._text import count
from ..atomic_files import write_file
from ..plan.hardware import Hardware
from . import collectives, kernels, speed, training
from . import environment as surroundings
from .check import Check, Part, Result, Settings, StepTime, Visit, examine


@dataclass(frozen=True)
class Diagnosis:
    """All that was found; the same on every rank."""

    subject: str
    """The ranks, in a line."""
    results: list[Result]
    steps: list[StepTime]
    advice: list[str]
    hardware: Hardware | None
    """None: the speed part was not run."""

    @property
    def is_healthy(self) -> bool:
        return all(result.state != "fault" for result in self.results)

    def as_dict(self) -> dict[str, Any]:
        return {"is_healthy": self.is_healthy, **asdict(self)}

    def save(self, path: Path) -> None:
        write_file(path, json.dumps(self.as_dict(), indent=1) + "\n")


def make_visit(
    settings: Settings,
    parts: Sequence[Part],
    timeout_seconds: float,
    on_progress: Callable[[str, str], None] = lambda part, name: None,
) -> Diagnosis:
    """Run the checks of these parts, on every rank of an initialized process group with this timeout."""
    visit = Visit.begin(settings, timeout_seconds)
    results = examine(_checks(settings, parts), visit, on_progress)
    subject = f"{count(visit.world.size, 'rank')}, {visit.world.device.type}"
    return Diagnosis(subject, results, visit.steps, visit.advice, visit.hardware)


def _checks(settings: Settings, parts: Sequence[Part]) -> Iterator[Check]:
    of_part: dict[Part, Callable[[], Iterator[Check]]] = {
        "surroundings": surroundings.checks,
        "kernels": kernels.checks,
        "collectives": collectives.checks,
        "training": lambda: training.checks(settings),
        "speed": speed.checks,
    }
    for part, checks in of_part.items():
        if part in parts:
            yield from checks()
