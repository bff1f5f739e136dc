"""The learning rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp.train.config import ScheduleConfig
from zeropp.train.schedule import learning_rate


@given(st.integers(0, 50), st.integers(2, 100), st.floats(0.0, 1.0))
def test_up_to_the_peak_and_down_to_the_last_step(warmup: int, decay: int, final: float) -> None:
    schedule, steps = ScheduleConfig(warmup, final), warmup + decay
    rates = [learning_rate(step, steps, 3.0, schedule) for step in range(1, steps + 1)]
    assert rates[:warmup] == pytest.approx([3.0 * step / warmup for step in range(1, warmup + 1)])
    assert all(early >= late for early, late in zip(rates[warmup:], rates[warmup + 1 :], strict=False))
    assert rates[-1] == pytest.approx(3.0 * final)
    assert max(rates) <= 3.0 * (1 + 1e-12)


def test_a_run_that_ends_in_its_warmup() -> None:
    assert learning_rate(3, 3, 1.0, ScheduleConfig(warmup_steps=6)) == 0.5
