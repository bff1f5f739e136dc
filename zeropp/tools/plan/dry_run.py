"""The dry run: the trace of one optimizer step, from fake steps of a few layers."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import chain

from ..strategies import Strategy
from .fake_step import Recording, record_step
from .memory_estimate import MemoryEstimate
from .repeat_layers import RECORDED_LAYERS, extrapolate_memory, repeat_events
from .scenario import Scenario
from .trace import Event, Trace

logger = logging.getLogger("zeropp")

RECORDED_MICRO_BATCHES = 3
"""The first micro-batch gathers across nodes, the last one reduces across nodes. All others are alike."""


def dry_run(scenario: Scenario, strategy: Strategy, *, full: bool = False) -> Trace:
    """Return the trace of rank 0 in one optimizer step. Needs neither devices nor other ranks.

    Args:
        scenario: the model, the ranks, the batch.
        strategy: plain FSDP2, HSDP, or a zeropp Config, with its gradient synchronization.
        full: run all layers and micro-batches. By default a few layers are run and multiplied, which gives
            the same trace.
    """
    if full:
        return _as_recorded(scenario, strategy, record_step(scenario, strategy))
    short = replace(scenario, micro_batches=min(scenario.micro_batches, RECORDED_MICRO_BATCHES))
    few = record_step(short, strategy, layers=RECORDED_LAYERS)
    if few.layer_count <= RECORDED_LAYERS:
        return _as_recorded(scenario, strategy, few)
    if few.layers_are_alike:
        one_more = record_step(short, strategy, layers=RECORDED_LAYERS + 1)
        if _predicts(few, one_more):
            return _multiplied(scenario, strategy, few, one_more)
    logger.warning("zeropp: the layers of %s differ, so all of them are run", scenario.model.name)
    return _as_recorded(scenario, strategy, record_step(short, strategy))


def _predicts(few: Recording, one_more: Recording) -> bool:
    """Return whether `repeat_events` gives the events of one more layer, as they were recorded."""
    return all(
        repeat_events(part, few.layers_name, 1) == [event for event, _ in longer]
        for part, longer in zip(few.parts, one_more.parts, strict=True)
    )


def _as_recorded(scenario: Scenario, strategy: Strategy, recording: Recording) -> Trace:
    events = [[event for event, _ in part] for part in recording.parts]
    memory = [memory for part in recording.parts for _, memory in part]
    return _trace(scenario, strategy, events, memory, recording.parameters, recording.comm_thread_bytes)


def _multiplied(scenario: Scenario, strategy: Strategy, few: Recording, one_more: Recording) -> Trace:
    """Return the trace of a model with all its layers."""
    name, missing = few.layers_name, few.layer_count - RECORDED_LAYERS
    pairs = list(zip(few.parts, one_more.parts, strict=True))
    events = [repeat_events(part, name, missing) for part, _ in pairs]
    memory = chain.from_iterable(extrapolate_memory(part, longer, name, missing) for part, longer in pairs)
    parameters = few.parameters + missing * (one_more.parameters - few.parameters)
    # Buffers of comm threads do not grow with the number of layers.
    return _trace(scenario, strategy, events, list(memory), parameters, few.comm_thread_bytes)


def _trace(
    scenario: Scenario,
    strategy: Strategy,
    parts: list[list[Event]],
    memory: list[MemoryEstimate],
    parameters: int,
    comm_thread_bytes: int,
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
        comm_thread_bytes=comm_thread_bytes,
    )
