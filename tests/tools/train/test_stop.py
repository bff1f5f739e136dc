"""Signals as flags."""

from __future__ import annotations

import os
import signal

import pytest

from zeropp.tools.train.stop import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_recorded_and_does_not_stop_the_process(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert stop.received == number
    assert signal.getsignal(number) is before
