"""Checks of the doctor as a job of ranks, with or without a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from tests.ranks import HANG_SECONDS, Ranks
from zeropp.tools.doctor.check import Check, Result, Settings, Visit, examine

Fault = Callable[[], AbstractContextManager[object]]
"""Something that goes wrong while the context is entered."""


def run(
    ranks: Ranks,
    checks: Callable[[Settings], Iterable[Check]],
    fault: Fault = nullcontext,
    on_ranks: tuple[int, ...] = (),
    node_size: int | None = 2,
    names: tuple[str, ...] = (),
    world: int = 4,
    device: str = "cpu",
    env: dict[str, str] | None = None,
) -> list[dict[str, Result]]:
    """Run checks, all or those of these names, with a fault on some ranks; on each, the results by name."""
    job = (visit, checks, fault, on_ranks, node_size, names, device)
    return ranks.run(*job, world=world, env=env)


def visit(
    checks: Callable[[Settings], Iterable[Check]],
    fault: Fault,
    on_ranks: tuple[int, ...],
    node_size: int | None,
    names: tuple[str, ...],
    device: str,
) -> dict[str, Result]:
    settings = Settings(node_size=node_size)
    chosen = [check for check in checks(settings) if not names or check.name in names]
    here = Visit.begin(settings, HANG_SECONDS)
    here.world = replace(here.world, device=torch.device(device))
    with fault() if dist.get_rank() in on_ranks else nullcontext():
        results = examine(chosen, here)
    return {result.name: result for result in results}
