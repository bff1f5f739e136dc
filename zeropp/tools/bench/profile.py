"""Split of a step's time into parts, from the labels of zeropp and torch in a profile."""

from __future__ import annotations

from typing import Any

from ...comm.profiler_labels import Label

PARTS = (
    "encode",
    "weights across",
    "weights in-node",
    "weights flat",
    "gradients in-node",
    "recode",
    "gradients across",
    "gradients flat",
    "decode",
    "wait",
    "other collectives",
    "compute",
)
"""Parts of a step's time, in the order of tables.

- "recode": decode, sum and encode between the two hops of gradients.
- "wait": time that the training thread waits for concurrent communication. If there is any, the hops run
  concurrently with compute, and only "wait" takes time from the step.
- "other collectives": collectives that zeropp did not send.
- "compute": the rest of the step.
"""

SUBJECT = {"all_gather": "weights", "reduce_scatter": "gradients"}


def split_step(profiler: Any, step_ms: float) -> dict[str, float]:
    """Return the milliseconds of each part. They add up to `step_ms`, unless hops overlap compute."""
    parts = dict.fromkeys(PARTS, 0.0)
    labelled: list[tuple[float, float]] = []
    collectives: list[tuple[float, float]] = []
    for event in profiler.events():
        start, end = event.time_range.start, event.time_range.end
        if part := part_of(event.name):
            parts[part] += (end - start) / 1e3
            labelled.append((start, end))
        elif event.name.startswith("gloo:"):
            collectives.append((start, end))
    parts["other collectives"] = _length([c for c in collectives if not _overlaps(c, labelled)]) / 1e3
    in_step = parts["wait"] + parts["other collectives"] if parts["wait"] else sum(parts.values())
    parts["compute"] = max(0.0, step_ms - in_step)
    return parts


def part_of(label: str) -> str | None:
    """Return the part of `PARTS` that a label of the profile belongs to, or None for other labels.

    >>> part_of(str(Label("all_gather", "across", "blocks.0")))
    'weights across'
    """
    read = Label.read(label)
    if read is None:
        return None
    return read.part if read.part in PARTS else f"{SUBJECT[read.collective]} {read.part}"


def _overlaps(span: tuple[float, float], others: list[tuple[float, float]]) -> bool:
    return any(start < span[1] and span[0] < end for start, end in others)


def _length(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of the spans, so that overlapping collectives count once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
