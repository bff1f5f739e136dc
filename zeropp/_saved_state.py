"""What the units of a model must save for a run that goes on bit for bit, and whether all ranks can use what
they have saved."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ._text import some
from ._unit import CompressedUnit
from .comm import AllGather, ReduceScatter

logger = logging.getLogger("zeropp")

Installed = tuple[CompressedUnit, AllGather, ReduceScatter]
NOTHING: Mapping[str, Any] = {"weights": {}, "gradients": {"calls": 0, "feedback": {}}}


def save_units(installed: Iterable[Installed]) -> dict[str, Any]:
    """What is kept of every unit on this rank, by name."""
    return {
        comms.unit.name: {"weights": gather.state_dict(), "gradients": reduce.state_dict()}
        for comms, gather, reduce in installed
    }


def load_units(installed: Iterable[Installed], units: Mapping[str, Any]) -> None:
    """Go on from what `save_units` returned; a unit that is not in it goes on without."""
    unused: list[str] = []
    for comms, gather, reduce in installed:
        unit = units.get(comms.unit.name, NOTHING)
        used = gather.load_state_dict(unit["weights"]), reduce.load_state_dict(unit["gradients"])
        unused += [] if all(used) else [comms.unit.name]
    if unused and dist.get_rank() == 0:
        logger.warning(
            "zeropp: what was saved of units %s is not used: this Config sends no differences, or keeps no "
            "errors",
            some(unused),
        )


def is_usable(
    unit_comms: Sequence[CompressedUnit], installed: Sequence[Installed], state: Mapping[str, Any] | None
) -> bool:
    """Whether all ranks can go on from the `state` that each of them has; if not, a warning says why. On
    every rank the same. Collective."""
    wrong = _why_not(installed, state)
    missing = {rank: why for rank, why in _everywhere(unit_comms, wrong).items() if why is not None}
    if wrong is not None and not missing:  # no group to ask
        missing = {dist.get_rank(): wrong}
    if missing:
        rank, why = min(missing.items())
        logger.warning(
            "zeropp: goes on without the saved state, on every rank: it cannot be used on ranks %s (rank "
            "%d: %s). The weights are sent anew, and kept errors start at zero",
            *(sorted(missing), rank, why),
        )
    return not missing


def _why_not(installed: Sequence[Installed], state: Mapping[str, Any] | None) -> str | None:
    """Why this rank cannot go on from `state`, or None."""
    pairs = {comms.unit.name: (gather, reduce) for comms, gather, reduce in installed}
    if state is None:
        return "there is none"
    mine = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    theirs = {name: state.get(name) for name in mine}
    units = set(state.get("units", ()))
    if theirs != mine or units != set(pairs):
        return f"it is of {theirs} and units {sorted(units)}; expected {mine} and {sorted(pairs)}"
    for name, (gather, reduce) in pairs.items():
        saved = state["units"][name]
        reason = gather.why_not_load(saved["weights"]) or reduce.why_not_load(saved["gradients"])
        if reason is not None:
            return reason
    return None


def _everywhere(unit_comms: Sequence[CompressedUnit], mine: str | None) -> dict[int, str | None]:
    """What all ranks that hold a part of these units say, by rank: every rank gets the same."""
    said: dict[int, str | None] = {}
    for group in {id(group): group for comms in unit_comms if (group := comms.unit.group)}.values():
        answers: list[str | None] = [None] * group.size()
        dist.all_gather_object(answers, mine, group=group)
        said |= dict(zip(dist.get_process_group_ranks(group), answers, strict=True))
    return said
