from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import HANG_SECONDS, Ranks
from tests.tools.doctor.check_job import run
from zeropp.tools.doctor.check import (
    Check,
    CheckReport,
    CheckResult,
    DoctorSettings,
    Session,
    merge_results,
    run_checks,
)

GOOD = CheckResult("ok", "all is well")


def failing(settings: DoctorSettings) -> Iterator[Check]:
    """Rank 2 raises while the others wait. The second check communicates, the third does not."""

    def fail(session: Session) -> CheckResult:
        (across, _) = session.topology.hops()
        if session.world.rank == 0:  # the peer of rank 2; ranks 1 and 3 need the usual timeout
            across.set_timeout(timedelta(seconds=3))
        if session.world.rank == 2:
            raise OSError("the cable is not plugged in")
        dist.all_reduce(torch.zeros(1), group=across.group)
        return GOOD

    yield Check("collectives", "fail", "", fail)
    yield Check("collectives", "after it", "", lambda _: GOOD)
    yield Check("kernels", "alone", "", lambda _: GOOD, communicates=False)


def test_a_check_that_raises_on_one_rank_does_not_block_the_others(ranks: Ranks) -> None:
    first, *others = run(ranks, failing)
    assert [_states(other) for other in others] == [_states(first)] * 3
    assert _states(first) == {"fail": "fault", "after it": "not run", "alone": "ok"}
    assert first["fail"].saw.startswith(
        "rank 2 raised OSError: the cable is not plugged in; then rank 0 raised"
    )
    assert "'fail' left ranks out of step" in first["after it"].saw


def _states(results: dict[str, Any]) -> dict[str, str]:
    return {name: result.state for name, result in results.items()}


def one_rank_leaves() -> list[CheckReport]:
    """Return the reports of rank 0 when rank 1 has left."""
    session = Session.begin(DoctorSettings(), HANG_SECONDS)
    session.timeout = timedelta(seconds=0.3)
    dist.barrier()  # else rank 1 may leave while rank 0 still connects
    if dist.get_rank() == 1:
        return []
    check = Check("collectives", "meet", "", lambda _: GOOD)
    return run_checks([check, check], session)


def test_a_missing_rank_is_named(ranks: Ranks) -> None:
    (report,), _ = ranks.run(one_rank_leaves, world=2)
    assert report.state == "fault"
    assert "Ranks 1 failed to pass monitoredBarrier" in report.saw


def test_one_rank_skips_the_checks_that_need_several(ranks: Ranks) -> None:
    (found,) = ranks.run(alone, world=1)
    assert found == [("needs ranks", "not run"), ("needs one rank", "ok")]


def alone() -> list[tuple[str, str]]:
    checks = [
        Check("training", "needs ranks", "", lambda _: GOOD),
        Check("kernels", "needs one rank", "", lambda _: GOOD, needs_ranks=False),
    ]
    results = run_checks(checks, Session.begin(DoctorSettings(), HANG_SECONDS))
    return [(result.name, result.state) for result in results]


def test_the_worst_result_counts_and_names_its_ranks() -> None:
    odd, bad = CheckResult("warning", "odd"), CheckResult("fault", "three", "count again")
    assert merge_results([GOOD, GOOD]) == GOOD
    assert merge_results([GOOD, CheckResult("ok", "another figure")]) == GOOD
    assert merge_results([GOOD, odd, GOOD]) == CheckResult("warning", "rank 1: odd")
    assert merge_results([bad, bad]) == bad
    several = merge_results([GOOD, bad, odd, bad, CheckResult("fault", "four")])
    assert several == CheckResult("fault", "ranks 1, 3: three; rank 4: four", "count again")


@pytest.mark.parametrize("name", ["node_size", "micro_batch", "micro_batches", "sequence", "rounds"])
def test_bad_settings_are_named(name: str) -> None:
    bad: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0; expected a positive number"):
        DoctorSettings(**bad)


@pytest.mark.parametrize("width", [0, 100])
def test_a_width_of_no_whole_heads_is_named(width: int) -> None:
    with pytest.raises(ValueError, match=f"width is {width}; expected a multiple of 64"):
        DoctorSettings(width=width)


def test_presets_take_the_node_size() -> None:
    assert {config.node_size for config in DoctorSettings(node_size=4).presets().values()} == {4}
    assert {config.node_size for config in DoctorSettings().presets().values()} == {"auto"}
