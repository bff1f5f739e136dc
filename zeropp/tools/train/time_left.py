"""Estimate of the time left in a job of several parts: expected times, corrected by the measured ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

PRIOR_SECONDS = 5.0
"""Weight of the expected times relative to the measured ones."""


@dataclass(frozen=True)
class Part:
    """A run of a known number of steps, with its expected times."""

    steps: int
    start_seconds: float
    """Time before the first step: processes start and import torch."""
    step_seconds: float

    @property
    def seconds(self) -> float:
        return self.start_seconds + self.steps * self.step_seconds


class TimeLeft:
    """Counts completed work in expected seconds and scales the rest by the pace so far.

    >>> now = 0.0
    >>> left = TimeLeft({"run": Part(steps=10, start_seconds=5.0, step_seconds=1.0)}, lambda: now)
    >>> left.seconds
    15.0
    >>> now = 20.0  # twice as slow as expected
    >>> left.update("run", 5)
    >>> left.done, round(left.seconds, 1)
    (10.0, 8.3)
    """

    def __init__(self, parts: Mapping[str, Part], clock: Callable[[], float] = time.monotonic) -> None:
        self.parts = dict(parts)
        """Parts in the order in which they run."""
        self.total = sum(part.seconds for part in self.parts.values())
        self.done = 0.0
        """Expected seconds of the completed work; never decreases."""
        self._clock = clock
        self._started = self._part_started = clock()
        self._name: str | None = None

    def update(self, name: str, steps: int) -> None:
        """Record that part `name` has completed `steps` steps and the parts before it are complete."""
        if name != self._name:
            self._name, self._part_started = name, self._clock()
        before = 0.0
        for other, part in self.parts.items():
            if other == name:
                break
            before += part.seconds
        waited = min(self._clock() - self._part_started, part.start_seconds)
        done = part.start_seconds + steps * part.step_seconds if steps else waited
        self.done = max(self.done, before + done)

    @property
    def seconds(self) -> float:
        """Seconds left; before any work is done, the expected time."""
        elapsed = self._clock() - self._started
        pace = (elapsed + PRIOR_SECONDS) / (self.done + PRIOR_SECONDS)
        return (self.total - self.done) * pace


def minutes(seconds: float) -> str:
    """Format seconds as minutes:seconds.

    >>> minutes(0.4), minutes(75)
    ('0:00', '1:15')
    """
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"
