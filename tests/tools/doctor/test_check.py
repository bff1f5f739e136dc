from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import HANG_SECONDS, Ranks
from tests.tools.doctor.visits import run
from zeropp.tools.doctor.check import Check, Finding, Result, Settings, Visit, examine, merge

GOOD = Finding("ok", "all is well")


def stumbling(settings: Settings) -> Iterator[Check]:
    """Rank 2 raises where the others wait for it; then a check that communicates, and one that does not."""

    def stumble(visit: Visit) -> Finding:
        (across, _) = visit.topology.hops()
        if visit.world.rank == 0:  # the peer of rank 2; ranks 1 and 3 meet, however long that takes
            across.set_timeout(timedelta(seconds=3))
        if visit.world.rank == 2:
            raise OSError("the cable is not plugged in")
        dist.all_reduce(torch.zeros(1), group=across.group)
        return GOOD

    yield Check("collectives", "stumble", "", stumble)
    yield Check("collectives", "after it", "", lambda _: GOOD)
    yield Check("kernels", "alone", "", lambda _: GOOD, communicates=False)


def test_a_check_that_raises_on_one_rank_holds_nobody_up(ranks: Ranks) -> None:
    first, *others = run(ranks, stumbling)
    assert [_states(other) for other in others] == [_states(first)] * 3
    assert _states(first) == {"stumble": "fault", "after it": "not run", "alone": "ok"}
    assert first["stumble"].saw.startswith(
        "rank 2 raised OSError: the cable is not plugged in; then rank 0 did"
    )
    assert "'stumble' left ranks out of step" in first["after it"].saw


def _states(results: dict[str, Any]) -> dict[str, str]:
    return {name: result.state for name, result in results.items()}


def deserted() -> list[Result]:
    """What rank 0 sees when rank 1 does not come."""
    here = Visit.begin(Settings(), HANG_SECONDS)
    here.timeout = timedelta(seconds=0.3)
    dist.barrier()  # or rank 1 may be gone while rank 0 still connects
    if dist.get_rank() == 1:
        return []
    check = Check("collectives", "meet", "", lambda _: GOOD)
    return examine([check, check], here)


def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    (met,), _ = ranks.run(deserted, world=2)
    assert met.state == "fault"
    assert "Ranks 1 failed to pass monitoredBarrier" in met.saw


def test_one_rank_says_what_it_could_not_check(ranks: Ranks) -> None:
    (found,) = ranks.run(alone, world=1)
    assert found == [("needs others", "not run"), ("needs nobody", "ok")]


def alone() -> list[tuple[str, str]]:
    checks = [
        Check("training", "needs others", "", lambda _: GOOD),
        Check("kernels", "needs nobody", "", lambda _: GOOD, needs_ranks=False),
    ]
    results = examine(checks, Visit.begin(Settings(), HANG_SECONDS))
    return [(result.name, result.state) for result in results]


def test_the_worst_finding_counts_and_names_its_ranks() -> None:
    odd, bad = Finding("warning", "odd"), Finding("fault", "three", "count again")
    assert merge([GOOD, GOOD]) == GOOD
    assert merge([GOOD, Finding("ok", "another figure")]) == GOOD
    assert merge([GOOD, odd, GOOD]) == Finding("warning", "rank 1: odd")
    assert merge([bad, bad]) == bad
    several = merge([GOOD, bad, odd, bad, Finding("fault", "four")])
    assert several == Finding("fault", "ranks 1, 3: three; rank 4: four", "count again")


@pytest.mark.parametrize("name", ["node_size", "micro_batch", "micro_batches", "sequence", "rounds"])
def test_bad_settings_are_named(name: str) -> None:
    bad: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0; expected a positive number"):
        Settings(**bad)


@pytest.mark.parametrize("width", [0, 100])
def test_a_width_that_has_no_heads_is_named(width: int) -> None:
    with pytest.raises(ValueError, match=f"width is {width}; expected a multiple of 64"):
        Settings(width=width)


def test_presets_take_the_node_size() -> None:
    assert {config.node_size for config in Settings(node_size=4).presets().values()} == {4}
    assert {config.node_size for config in Settings().presets().values()} == {"auto"}
