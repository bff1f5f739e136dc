"""The learning rate of every step."""

from __future__ import annotations

import math

from .config import ScheduleConfig


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Of step 1, 2, ..., `steps`: up in a line to `peak`, then down a cosine.

    >>> schedule = ScheduleConfig(warmup_steps=2, final_fraction=0.1)
    >>> [round(learning_rate(step, 6, 1.0, schedule), 3) for step in range(1, 7)]
    [0.5, 1.0, 0.868, 0.55, 0.232, 0.1]
    """
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    progress = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * cosine)
