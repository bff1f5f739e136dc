"""Ctrl-C and SIGTERM as a flag that the training loop reads between two steps."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Records a signal, inside a `with` block, instead of stopping the process.

    Repeated signals have no effect: on Ctrl-C, a rank gets SIGINT from the terminal and again from torchrun.
    Ranks get a signal at different times, so the ranks agree at the end of a step: all stop after the same
    step.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
