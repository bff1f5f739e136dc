"""The doctor on a device with streams, where data arrives only after a wait."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from tests.ranks import Ranks
from tests.streamed import device
from tests.tools.doctor.check_job import run
from zeropp.comm import Wire
from zeropp.tools.doctor import collectives
from zeropp.tools.doctor.check import Check, DoctorSettings


def checks(settings: DoctorSettings) -> Iterator[Check]:
    return collectives.checks()


def test_every_hop_in_both_directions(streamed_ranks: Ranks) -> None:
    found, *_ = run(streamed_ranks, checks, device=device.NAME)
    assert {name: result.saw for name, result in found.items() if result.state != "ok"} == {}


def forgets_to_wait() -> AbstractContextManager[object]:
    """The hop starts, and nothing waits for it."""
    right = Wire.all_gather

    def wrong(wire: Wire, *given: Any) -> Generator[None]:
        next(right(wire, *given))
        yield

    return patch.object(Wire, "all_gather", wrong)


def test_a_hop_that_drops_a_wait_is_named(streamed_ranks: Ranks) -> None:
    names = ("hop across", "both directions at once")
    found, *_ = run(streamed_ranks, checks, forgets_to_wait, (0, 1, 2, 3), names=names, device=device.NAME)
    for name in names:
        assert found[name].state == "fault"
        assert "a missing wait" in found[name].saw
