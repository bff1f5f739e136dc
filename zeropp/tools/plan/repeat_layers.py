"""Layers that repeat: from the recording of a few to the recording of all.

In forward and in backward, a model goes from layer to layer. A *visit* is what happens from the first compute
of a layer to the first compute of the next one; it holds that layer's events and those that FSDP2 has put
there for its neighbours (the prefetch of the next gather). Visits to layers in the middle differ only in the
names of the units, so one of them can stand for all:

    recorded, 4 layers    visits 0  1  2  3     3  2  1  0
    wanted, 7 layers      visits 0  1  2  2' 2' 2' 3'    3' 2' 2' 2' 2  1  0      ' with units renamed

Memory grows linearly with the number of layers at every event that keeps its distance from the first layer or
from the last, so two recordings, of 4 layers and of 5, give it for any number. Between the ends it is linear
in the position, too, so its largest value is near one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .memory_estimate import MemoryEstimate
from .trace import Compute, Event

RECORDED = 4
"""Layers that are enough: a visit to layer 2 has layers before it to prefetch, and one after it."""
TYPICAL = 2
"""The layer whose visits stand for all that are left out."""

Part = list[tuple[Event, MemoryEstimate]]
"""Events, and for each of them the memory when it was largest since the event before."""


def repeated(part: Part, prefix: str, missing: int) -> list[Event]:
    """The events of a model with `missing` more layers, `prefix`.0 and so on, than were recorded."""
    events: list[Event] = []
    before = -1
    for layer, visit in _visits(part, prefix):
        shifts = [0] if layer < TYPICAL else [missing]
        if layer == TYPICAL:
            shifts = list(range(missing + 1)) if before < layer else list(range(missing, -1, -1))
        events += [_shifted(event, prefix, shift) for shift in shifts for event, _ in visit]
        before = layer
    return events


def grown(part: Part, of_one_more: Part, prefix: str, missing: int) -> list[MemoryEstimate]:
    """Memory of a model with `missing` layers more than in `part`, given the recording of one more."""
    longer = [item for layer, visit in _visits(of_one_more, prefix) if layer != TYPICAL for item in visit]
    pairs = zip(part, longer, strict=True)
    return [memory.grown(larger, missing) for (_, memory), (_, larger) in pairs]


def _visits(part: Part, prefix: str) -> Iterator[tuple[int, Part]]:
    """The part, cut into visits, with the layer that is visited; -1 before the first."""
    visited = -1
    visit: Part = []
    for event, memory in part:
        layer = _layer(event, prefix)
        if isinstance(event, Compute) and layer is not None and layer != visited:
            yield visited, visit
            visited, visit = layer, []
        visit.append((event, memory))
    yield visited, visit


def _layer(event: Event, prefix: str) -> int | None:
    """Which layer the event is about."""
    before, _, number = event.unit.rpartition(".")
    return int(number) if before == prefix else None


def _shifted(event: Event, prefix: str, shift: int) -> Event:
    layer = _layer(event, prefix)
    return event if layer is None else replace(event, unit=f"{prefix}.{layer + shift}")
