"""Checks of the doctor on ranks of the test pool, with or without an injected fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from tests.ranks import HANG_SECONDS, Ranks
from zeropp.tools.doctor.check import Check, CheckReport, DoctorSettings, Session, run_checks

Fault = Callable[[], AbstractContextManager[object]]
"""A context in which something is wrong."""


def run(
    ranks: Ranks,
    checks: Callable[[DoctorSettings], Iterable[Check]],
    fault: Fault = nullcontext,
    on_ranks: tuple[int, ...] = (),
    node_size: int | None = 2,
    names: tuple[str, ...] = (),
    world: int = 4,
    device: str = "cpu",
    env: dict[str, str] | None = None,
) -> list[dict[str, CheckReport]]:
    """Run all checks or those named, with a fault on some ranks. Return the reports of each rank by name."""
    job = (run_on_rank, checks, fault, on_ranks, node_size, names, device)
    return ranks.run(*job, world=world, env=env)


def run_on_rank(
    checks: Callable[[DoctorSettings], Iterable[Check]],
    fault: Fault,
    on_ranks: tuple[int, ...],
    node_size: int | None,
    names: tuple[str, ...],
    device: str,
) -> dict[str, CheckReport]:
    settings = DoctorSettings(node_size=node_size)
    chosen = [check for check in checks(settings) if not names or check.name in names]
    session = Session.begin(settings, HANG_SECONDS)
    session.world = replace(session.world, device=torch.device(device))
    with fault() if dist.get_rank() in on_ranks else nullcontext():
        reports = run_checks(chosen, session)
    return {report.name: report for report in reports}
