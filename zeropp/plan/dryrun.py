"""The dry run: the trace of one optimizer step, from rehearsals of as little of it as is needed."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import chain

from ..strategies import Strategy
from .layers import RECORDED, grown, repeated
from .memory import MemoryEstimate
from .rehearsal import Recording, rehearse
from .scenario import Scenario
from .trace import Event, Trace

logger = logging.getLogger("zeropp")

REHEARSED_MICRO_BATCHES = 3
"""The first gathers across nodes, the last reduces across nodes, and all between them do the same."""


def dry_run(scenario: Scenario, row: Strategy, *, full: bool = False) -> Trace:
    """What rank 0 does in one step of `scenario`, trained as `row` says. Needs no devices and no ranks.

    Args:
        scenario: the model, the ranks, the batch.
        row: plain FSDP2, HSDP, or a zeropp Config, and when gradients are synchronized.
        full: rehearse all layers and micro-batches. Otherwise layers that do the same are rehearsed a few
            times and multiplied, which gives the same trace.
    """
    short = replace(scenario, micro_batches=min(scenario.micro_batches, REHEARSED_MICRO_BATCHES))
    if full:
        return _trace(scenario, *_as_recorded(rehearse(scenario, row)))
    few = rehearse(short, row, layers=RECORDED)
    if few.layers > RECORDED:
        one_more = rehearse(short, row, layers=RECORDED + 1)
        if few.are_alike and _next_follows(few, one_more):
            return _trace(scenario, *_multiplied(few, one_more))
        logger.warning("zeropp: the layers of %s differ, so all of them are rehearsed", scenario.model.name)
        few = rehearse(short, row)
    return _trace(scenario, *_as_recorded(few))


def _next_follows(few: Recording, one_more: Recording) -> bool:
    """Whether the recording of one more layer is what `repeated` would have made of the first."""
    return all(
        repeated(part, few.layers_name, 1) == [event for event, _ in longer]
        for part, longer in zip(few.parts, one_more.parts, strict=True)
    )


def _as_recorded(recording: Recording) -> tuple[list[list[Event]], list[MemoryEstimate], int]:
    events = [[event for event, _ in part] for part in recording.parts]
    memory = [memory for part in recording.parts for _, memory in part]
    return events, memory, recording.parameters


def _multiplied(few: Recording, one_more: Recording) -> tuple[list[list[Event]], list[MemoryEstimate], int]:
    """The same for all layers."""
    name, missing = few.layers_name, few.layers - RECORDED
    pairs = list(zip(few.parts, one_more.parts, strict=True))
    events = [repeated(part, name, missing) for part, _ in pairs]
    memory = chain.from_iterable(grown(part, longer, name, missing) for part, longer in pairs)
    parameters = few.parameters + missing * (one_more.parameters - few.parameters)
    return events, list(memory), parameters


def _trace(
    scenario: Scenario, parts: list[list[Event]], memory: list[MemoryEstimate], parameters: int
) -> Trace:
    *micro_batches, optimizer = parts
    missing = scenario.micro_batches - len(micro_batches)
    if missing:
        first, middle, last = micro_batches
        micro_batches = [first, *[middle] * (missing + 1), last]
    return Trace(
        events=tuple(chain(*micro_batches, optimizer)),
        parameters=parameters,
        nodes=scenario.nodes,
        ranks_per_node=scenario.ranks_per_node,
        micro_batches=scenario.micro_batches,
        tokens=scenario.tokens,
        memory=max(memory, key=lambda moment: moment.peak),
    )
