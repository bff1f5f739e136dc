"""Ctrl-C and SIGTERM as a question that the training asks between two steps."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Remembers a signal, inside its `with` block, instead of acting on it.

    torchrun passes on to its ranks what the terminal has sent them already, so repeats mean nothing. Ranks
    hear of a signal at different times: the training stops when all ranks know that one of them has heard it.
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
