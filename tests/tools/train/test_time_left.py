"""The estimate of the time left: expected times first, then the measured pace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp.tools.train.time_left import Part, TimeLeft

PARTS = {"first": Part(10, 8.0, 0.2), "second": Part(50, 8.0, 0.6), "third": Part(50, 4.0, 0.2)}


@given(slowness=st.floats(0.2, 20.0))
def test_the_estimate_adapts_to_the_machine(slowness: float) -> None:
    """On a machine `slowness` times as slow, the estimate is between the expected time and the true one."""
    now = 0.0
    left = TimeLeft(PARTS, lambda: now)
    total = sum(part.seconds for part in PARTS.values())
    assert left.seconds == pytest.approx(total)
    done = 0.0
    for name, part in PARTS.items():
        left.update(name, 0)
        now += slowness * part.start_seconds
        for step in range(1, part.steps + 1):
            now += slowness * part.step_seconds
            left.update(name, step)
            assert done < left.done <= left.total + 1e-6
            done = left.done
            expected = total - done
            low, high = sorted((expected, slowness * expected))
            assert low - 1e-6 <= left.seconds <= high + 1e-6
    assert left.seconds == pytest.approx(0.0, abs=1e-6)


def test_a_start_that_takes_longer_than_expected_is_no_progress() -> None:
    now = 0.0
    left = TimeLeft(PARTS, lambda: now)
    left.update("first", 0)
    now = 4.0
    left.update("first", 0)
    assert (left.done, left.seconds) == (4.0, left.total - 4.0)
    now = 100.0
    left.update("first", 0)
    assert left.done == 8.0
    assert left.seconds > left.total
