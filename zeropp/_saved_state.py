"""What a checkpoint holds of zeropp: one record per rank, and the checks before it is used.

[Note: Meaning of saved bytes]
A reference of differences and stored errors are encoded bytes. Their meaning follows from the Config, and
from the layout of rows, blocks and segments (`VERSION`). So each unit's record holds its Config. A record of
another version, model or world, or one whose bytes mean something else under the present Config, is refused
on all ranks, with a warning that names the difference. A part for which the present Config has no use is
dropped, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NotRequired, TypedDict

import torch.distributed as dist
from torch import Tensor

from ._text import some
from ._unit import CompressedUnit
from .comm.all_gather import WEIGHTS_FIELDS
from .comm.reduce_scatter import FEEDBACK_FIELDS
from .config import Config

logger = logging.getLogger("zeropp")

VERSION = 3
"""Version of this record, and of the layout of rows, blocks and segments that its bytes have."""


class SavedUnit(TypedDict):
    """State of one unit on one rank that cannot be rebuilt from the weights."""

    config: dict[str, Any]
    """All fields of the unit's Config, and `rotates`."""
    references: list[dict[str, Any]]
    """References of weight differences, one per group of columns; empty without differences."""
    calls: int
    """Number of reductions, from which the noise of stochastic rounding follows."""
    errors: dict[int, Tensor]
    """Stored errors of error feedback, by chunk."""


class SavedState(TypedDict):
    """State of one rank: tensors, numbers and names only."""

    version: int
    rank: int
    world_size: int
    units: dict[str, SavedUnit]
    auto: NotRequired[dict[str, Any]]
    """What "auto" has chosen, and why."""


def save_units(units: Iterable[CompressedUnit]) -> SavedState:
    """Copies of the state of these units on this rank."""
    saved: dict[str, SavedUnit] = {}
    for comms in units:
        if comms.pair is not None:
            gradients = comms.pair.reduce_scatter.state_dict()
            saved[comms.unit.name] = SavedUnit(
                config=_fields(comms.config),
                references=comms.pair.all_gather.state_dict(),
                calls=gradients["calls"],
                errors=gradients["errors"],
            )
    return SavedState(version=VERSION, rank=dist.get_rank(), world_size=dist.get_world_size(), units=saved)


def load_units(units: Iterable[CompressedUnit], saved: Mapping[str, SavedUnit]) -> None:
    """Continue from what `save_units` returned; a unit that is not part of it starts again. Collective."""
    dropped: list[str] = []
    for comms in units:
        if comms.pair is None or comms.unit.group is None:
            continue
        gather, reduce = comms.pair
        state = saved.get(comms.unit.name)
        references = state["references"] if state is not None and gather.sends_differences else []
        gather.load_state_dict(references, comms.unit.group, comms.unit.device)
        reduce.load_state_dict(
            0 if state is None else int(state["calls"]), {} if state is None else state["errors"]
        )
        if state is not None:
            uses_all = len(references) == len(state["references"]) and (
                reduce.feedback or not state["errors"]
            )
            dropped += [] if uses_all else [comms.unit.name]
    if dropped and dist.get_rank() == 0:
        logger.warning(
            "zeropp: saved state of units %s is dropped: this Config sends no differences, or stores no "
            "errors",
            some(dropped),
        )


def is_usable(units: Sequence[CompressedUnit], state: Mapping[str, Any] | None) -> bool:
    """Whether all ranks can continue from their `state`; if not, a warning gives the reason. The same on
    every rank. Collective."""
    mine = _why_not(units, state)
    reasons = {rank: why for rank, why in _everywhere(units, mine).items() if why is not None}
    if mine is not None and not reasons:  # no group to ask
        reasons = {dist.get_rank(): mine}
    if reasons:
        rank, why = min(reasons.items())
        logger.warning(
            "zeropp: the saved state is not used, on any rank: it cannot be used on ranks %s (rank %d: %s). "
            "The weights are sent again, and stored errors start at zero",
            *(sorted(reasons), rank, why),
        )
    return not reasons


def _why_not(units: Sequence[CompressedUnit], state: Mapping[str, Any] | None) -> str | None:
    """Why this rank cannot continue from `state`, or None."""
    if state is None:
        return "there is none"
    expected = {"version": VERSION, "rank": dist.get_rank(), "world_size": dist.get_world_size()}
    given = {name: state.get(name) for name in expected}
    mine = {comms.unit.name: comms for comms in units if comms.pair is not None}
    saved: Mapping[str, SavedUnit] = state.get("units", {})
    if given != expected or set(saved) != set(mine):
        return f"it is of {given} and units {sorted(saved)}; expected {expected} and {sorted(mine)}"
    reasons = (_why_unit_does_not_fit(mine[name], saved[name]) for name in mine)
    return next((reason for reason in reasons if reason is not None), None)


def _why_unit_does_not_fit(comms: CompressedUnit, saved: SavedUnit) -> str | None:
    """See [Note: Meaning of saved bytes]. Only state that would be used can be wrong."""
    assert comms.pair is not None
    gather, reduce = comms.pair
    uses_references = bool(saved["references"]) and gather.sends_differences
    uses_errors = bool(saved["errors"]) and reduce.feedback is not None
    now, unit = _fields(comms.config), f"unit '{comms.unit.name}' has"
    for is_used, what, fields in (
        (uses_references, "weights", WEIGHTS_FIELDS),
        (uses_errors, "stored errors", FEEDBACK_FIELDS),
    ):
        different = [name for name in fields if is_used and saved["config"].get(name) != now[name]]
        if different:
            texts = [f"{name} {saved['config'].get(name)!r}, expected {now[name]!r}" for name in different]
            return f"{unit} {what} of another Config: {'; '.join(texts)}"
    why = gather.why_not_load(saved["references"]) if uses_references else None
    return None if why is None else f"{unit} {why}"


def _fields(config: Config) -> dict[str, Any]:
    return asdict(config) | {"rotates": config.rotates}


def _everywhere(units: Sequence[CompressedUnit], mine: str | None) -> dict[int, str | None]:
    """The reasons of all ranks that hold a part of these units, by rank: the same on every rank."""
    said: dict[int, str | None] = {}
    for group in {id(group): group for comms in units if (group := comms.unit.group)}.values():
        answers: list[str | None] = [None] * group.size()
        dist.all_gather_object(answers, mine, group=group)
        said |= dict(zip(dist.get_process_group_ranks(group), answers, strict=True))
    return said
