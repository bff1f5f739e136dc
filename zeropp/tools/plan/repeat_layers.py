"""Extrapolation of a recording with a few layers to a model with all of its layers.

A *visit* of a layer lasts from the layer's first compute to the next layer's first compute. A forward visits
the layers in ascending order, a backward in descending order. FSDP2 prefetches, so a visit also has events of
neighbouring layers. Visits of middle layers differ only in the names of their units, so copies of one visit,
with its units renamed, replace all of them:

               forward                                 backward
    4 layers   0  1  2                      3          3          2                      1  0
    7 layers   0  1  2   2+1   2+2   2+3    3+3        3+3        2+3   2+2   2+1   2    1  0

`2+1` is a copy of visit 2 with 1 added to the layer of each of its units.

Memory is linear in the number of layers, at every event that keeps its distance from the first or from the
last layer. Two recordings, of 4 and of 5 layers, give it for any number:

    4 layers   0  1       2  3         memory m
    5 layers   0  1  (2)  3  4         memory m' of the same events; visits of layer 2 are left out
    4 + missing layers                 m + missing * (m' - m)

In the middle, memory is also linear in the position, so its maximum is near one of the ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .memory_estimate import MemoryEstimate
from .trace import Compute, Event

RECORDED_LAYERS = 4
"""Number of layers to record. A visit of layer 2 has layers to prefetch before it, and one after it."""
TYPICAL_LAYER = 2
"""The layer whose visits are copied."""

StepPart = list[tuple[Event, MemoryEstimate]]
"""Events of one micro-batch or of the optimizer, each with the memory peak since the event before."""


def repeat_events(part: StepPart, prefix: str, missing: int) -> list[Event]:
    """Return the events of a model with `missing` more layers than were recorded.

    Args:
        part: the recorded events.
        prefix: name of the list of layers. Its units are `prefix`.0 and so on.
        missing: number of layers to add.
    """
    events: list[Event] = []
    before = -1
    for layer, visit in _visits(part, prefix):
        if layer < TYPICAL_LAYER:
            shifts = range(1)
        elif layer > TYPICAL_LAYER:
            shifts = range(missing, missing + 1)
        elif before < layer:  # forward
            shifts = range(missing + 1)
        else:
            shifts = range(missing, -1, -1)
        events += [_shifted(event, prefix, shift) for shift in shifts for event, _ in visit]
        before = layer
    return events


def extrapolate_memory(
    part: StepPart, of_one_more: StepPart, prefix: str, missing: int
) -> list[MemoryEstimate]:
    """Return the memory of a model with `missing` more layers than `part`, at each event of `part`.

    Args:
        part: the recorded events.
        of_one_more: the recording of a model with one more layer.
        prefix: name of the list of layers.
        missing: number of layers to add to those of `part`.
    """
    longer = [
        recorded
        for layer, visit in _visits(of_one_more, prefix)
        if layer != TYPICAL_LAYER
        for recorded in visit
    ]
    pairs = zip(part, longer, strict=True)
    return [memory.extrapolate(larger, missing) for (_, memory), (_, larger) in pairs]


def _visits(part: StepPart, prefix: str) -> Iterator[tuple[int, StepPart]]:
    """Yield each visit with its layer. Events before the first visit have layer -1."""
    visited = -1
    visit: StepPart = []
    for event, memory in part:
        layer = _layer(event, prefix)
        if isinstance(event, Compute) and layer is not None and layer != visited:
            yield visited, visit
            visited, visit = layer, []
        visit.append((event, memory))
    yield visited, visit


def _layer(event: Event, prefix: str) -> int | None:
    """Return the layer of the event's unit, or None for other units."""
    before, _, number = event.unit.rpartition(".")
    return int(number) if before == prefix else None


def _shifted(event: Event, prefix: str, shift: int) -> Event:
    layer = _layer(event, prefix)
    return event if layer is None else replace(event, unit=f"{prefix}.{layer + shift}")
