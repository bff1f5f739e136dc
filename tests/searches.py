"""Searches of `apply(model, "auto")` for tests: how long they take, and ways that are slow."""

from __future__ import annotations

import logging
import logging.handlers
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist

import zeropp
from tests.training import Trainer
from zeropp import _auto as auto
from zeropp._auto import DEFAULT, NODE_SHARD, PLAIN, TIMED_STEPS, WARM_UP_STEPS, Search

NODES = {"LOCAL_WORLD_SIZE": "2"}
OVERLAPPED = f"{PLAIN}, overlapped"
LONGEST = 2 * 4 * (WARM_UP_STEPS + TIMED_STEPS) + 1
"""Steps that a search of four candidates takes at most."""
VISIT = 2
short_visits = patch.multiple(auto, WARM_UP_STEPS=VISIT - 1, TIMED_STEPS=1)
"""Around a job that is not about what is chosen: visits of two steps."""
STARTS = {PLAIN: 0, OVERLAPPED: VISIT + 1, NODE_SHARD: 2 * VISIT + 1, DEFAULT: 3 * VISIT + 1}
"""After how many steps each is tried first, in short visits: the clock starts with the first one."""
TO_THE_LAST = STARTS[DEFAULT] + 2
"""Steps until all were tried."""
Slow = Literal["large messages", "messages"]


class Clock:
    """The clock of a search. It moves when it is read and in slow messages. The load of the machine does not
    move it."""

    def __init__(self) -> None:
        self._now = 0.0
        self._lock = threading.Lock()  # lanes send, too

    def move(self, seconds: float) -> float:
        with self._lock:
            self._now += seconds
            return self._now


@contextmanager
def slow(what: Slow) -> Iterator[None]:
    """By the clock of rank 1: FSDP2's own collectives and messages of fp32 take long, or all messages between
    ranks."""
    clock = Clock()

    def taking_long(original: Callable[..., Any], is_slow: Callable[[torch.Tensor], bool]) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if dist.get_rank() == 1 and is_slow(tensor):
                clock.move(0.05)
            return original(tensor, *args, **kwargs)

        return call

    names = ["isend"] if what == "messages" else ["isend", "all_gather_single", "reduce_scatter_single"]
    least = 0 if what == "messages" else 1000
    calls = {name: taking_long(getattr(dist, name), lambda t: t.nbytes > least) for name in names}
    with (
        patch.multiple(dist, **calls),
        patch.object(auto, "time", SimpleNamespace(perf_counter=lambda: clock.move(0.01))),
    ):
        yield


@contextmanager
def logged() -> Iterator[Callable[[], str]]:
    log, logger = logging.handlers.BufferingHandler(1000), logging.getLogger("zeropp")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(log)
    yield lambda: "\n".join(record.getMessage() for record in log.buffer)
    logger.removeHandler(log)
    logger.setLevel(level)


def start(**options: Any) -> tuple[Trainer, zeropp.ZeroPP, Search]:
    trainer = Trainer(None, **options)
    trainer.zpp = zpp = zeropp.apply(trainer.net, "auto")
    assert zpp.search is not None
    return trainer, zpp, zpp.search


def until_chosen(trainer: Trainer, search: Search) -> list[float]:
    """Losses of all steps of the search, and of one more."""
    losses = []
    while search.chosen is None:
        losses.append(trainer.step())
        assert len(losses) <= LONGEST
    return [*losses, trainer.step()]
