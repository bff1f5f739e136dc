"""Where the time of a step goes, from the labels that zeropp and torch leave in a profile."""

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
"""What the time of a step is split into, in its order. "recode" is decode, sum and encode between the two
hops of the gradients; "wait" is what the training thread waits for them, if they run beside it, and then only
that takes time from the step; "other collectives" are those that zeropp did not send; "compute" is all the
rest of the step."""

SUBJECT = {"all_gather": "weights", "reduce_scatter": "gradients"}


def split_step(profiler: Any, step_ms: float) -> dict[str, float]:
    """Milliseconds per part; they add up to `step_ms`, unless hops run beside what computes."""
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
    """Which of `PARTS` a label of the profile stands for; None: it is not one of zeropp's.

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
    """How much time the spans cover together: collectives that overlap are waited for once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
