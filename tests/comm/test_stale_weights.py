"""Failed checks on their way to the host. A device with streams is played by counts that arrive late."""

from __future__ import annotations

import logging

import pytest
import torch

from zeropp.comm import Alarm, StaleWeightsError

FAILED, PASSED = torch.tensor(True), torch.tensor(False)


def deferred() -> Alarm:
    """As on a device with streams, with a device that is never behind."""
    alarm = Alarm()
    alarm.at_once = False
    return alarm


def test_on_cpu_a_failure_raises_where_it_is_reported() -> None:
    alarm = Alarm()
    alarm.report("layers.7", PASSED)
    with pytest.raises(StaleWeightsError, match=r"weights of unit 'layers.7' changed"):
        alarm.report("layers.7", FAILED)
    alarm.report("layers.7", PASSED)  # said once


def test_with_streams_a_failure_raises_at_the_next_look() -> None:
    alarm = deferred()
    alarm.report("layers.7", FAILED)
    alarm.report("layers.8", PASSED)
    with pytest.raises(StaleWeightsError, match=r"weights of unit 'layers.7' changed"):
        alarm.raise_if_known()
    alarm.raise_if_known()  # said once
    alarm.report("layers.7", FAILED)  # and again
    with pytest.raises(StaleWeightsError):
        alarm.raise_if_known()


def test_what_fails_while_a_count_is_on_its_way_comes_with_the_next() -> None:
    alarm = deferred()
    alarm.report("layers.7", PASSED)  # this count is on its way
    alarm.report("layers.7", FAILED)
    alarm.raise_if_known()
    alarm.report("layers.7", PASSED)
    with pytest.raises(StaleWeightsError):
        alarm.raise_if_known()


def test_waiting_finds_what_has_not_been_sent() -> None:
    alarm = deferred()
    alarm.report("layers.7", PASSED)
    alarm.report("layers.7", FAILED)
    with pytest.raises(StaleWeightsError):
        alarm.raise_if_any()
    alarm.raise_if_any()  # said once
    alarm.raise_if_known()


def test_the_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    alarm = deferred()
    alarm.report("layers.7", FAILED)
    with caplog.at_level(logging.ERROR, "zeropp"):
        alarm.log_if_known()
    assert "unit 'layers.7' changed" in caplog.text
