"""A run of the doctor: all selected parts, in order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..._text import count
from ..atomic_files import write_file
from ..plan.hardware import Hardware
from . import collectives, environment, kernels, speed, training
from .check import Check, CheckReport, DoctorSettings, Part, Session, StepTime, run_checks


@dataclass(frozen=True)
class Diagnosis:
    """All results of a run. They are the same on every rank."""

    subject: str
    """Number of ranks and their device."""
    results: list[CheckReport]
    steps: list[StepTime]
    advice: list[str]
    hardware: Hardware | None
    """Measured hardware; None without the speed part."""

    @property
    def is_healthy(self) -> bool:
        return all(result.state != "fault" for result in self.results)

    def as_dict(self) -> dict[str, Any]:
        return {"is_healthy": self.is_healthy, **asdict(self)}

    def save(self, path: Path) -> None:
        write_file(path, json.dumps(self.as_dict(), indent=1) + "\n")


def diagnose(
    settings: DoctorSettings,
    parts: Sequence[Part],
    timeout_seconds: float,
    on_progress: Callable[[str, str], None] = lambda part, name: None,
) -> Diagnosis:
    """Run the checks of these parts. Collective over an initialized process group with this timeout."""
    session = Session.begin(settings, timeout_seconds)
    results = run_checks(_checks(settings, parts), session, on_progress)
    subject = f"{count(session.world.size, 'rank')}, {session.world.device.type}"
    return Diagnosis(subject, results, session.steps, session.advice, session.hardware)


def _checks(settings: DoctorSettings, parts: Sequence[Part]) -> Iterator[Check]:
    of_part: dict[Part, Callable[[], Iterator[Check]]] = {
        "surroundings": environment.checks,
        "kernels": kernels.checks,
        "collectives": collectives.checks,
        "training": lambda: training.checks(settings),
        "speed": speed.checks,
    }
    for part, checks in of_part.items():
        if part in parts:
            yield from checks()
