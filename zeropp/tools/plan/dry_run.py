"""The dry run: the trace of one optimizer step, from fake steps of as few layers as are needed."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import chain

from ..strategies import Strategy
from .fake_step import Recording, record_step
from .memory_estimate import MemoryEstimate
from .repeat_layers import RECORDED, grown, repeated
from .scenario import Scenario
from .trace import Event, Trace

logger = logging.getLogger("zeropp")

RECORDED_MICRO_BATCHES = 3
"""The first gathers across nodes, the last reduces across nodes, and all between them do the same."""


def dry_run(scenario: Scenario, strategy: Strategy, *, full: bool = False) -> Trace:
    """What rank 0 does in one step of `scenario`, trained as `strategy` says. Needs no devices and no ranks.

    Args:
        scenario: the model, the ranks, the batch.
        strategy: plain FSDP2, HSDP, or a zeropp Config, and when gradients are synchronized.
        full: run all layers and micro-batches. Otherwise a few of the layers that do the same are run, and
            multiplied, which gives the same trace.
    """
    short = replace(scenario, micro_batches=min(scenario.micro_batches, RECORDED_MICRO_BATCHES))
    if full:
        return _as_recorded(scenario, strategy, record_step(scenario, strategy))
    few = record_step(short, strategy, layers=RECORDED)
    if few.layers > RECORDED:
        if few.are_alike:
            one_more = record_step(short, strategy, layers=RECORDED + 1)
            if _next_follows(few, one_more):
                return _multiplied(scenario, strategy, few, one_more)
        logger.warning("zeropp: the layers of %s differ, so all of them are run", scenario.model.name)
        few = record_step(short, strategy)
    return _as_recorded(scenario, strategy, few)


def _next_follows(few: Recording, one_more: Recording) -> bool:
    """Whether the recording of one more layer is what `repeated` would have made of the first."""
    return all(
        repeated(part, few.layers_name, 1) == [event for event, _ in longer]
        for part, longer in zip(few.parts, one_more.parts, strict=True)
    )


def _as_recorded(scenario: Scenario, strategy: Strategy, recording: Recording) -> Trace:
    events = [[event for event, _ in part] for part in recording.parts]
    memory = [memory for part in recording.parts for _, memory in part]
    return _trace(scenario, strategy, events, memory, recording.parameters, recording.lanes_bytes)


def _multiplied(scenario: Scenario, strategy: Strategy, few: Recording, one_more: Recording) -> Trace:
    """The trace of a model with all its layers. What lanes hold does not grow with them."""
    name, missing = few.layers_name, few.layers - RECORDED
    pairs = list(zip(few.parts, one_more.parts, strict=True))
    events = [repeated(part, name, missing) for part, _ in pairs]
    memory = chain.from_iterable(grown(part, longer, name, missing) for part, longer in pairs)
    parameters = few.parameters + missing * (one_more.parameters - few.parameters)
    return _trace(scenario, strategy, events, list(memory), parameters, few.lanes_bytes)


def _trace(
    scenario: Scenario,
    strategy: Strategy,
    parts: list[list[Event]],
    memory: list[MemoryEstimate],
    parameters: int,
    lanes_bytes: int,
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
        overlaps=strategy.overlaps,
        lanes_bytes=lanes_bytes,
    )
