"""What is kept of a unit on this rank between calls: now, and as soon as all of it is in place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Footprint:
    """Bytes, by what they are for.

    >>> Footprint(node_shard=1000, pending=4000) + Kept(errors=500)
    Footprint(node_shard=1000, errors=500, pending=4000)
    >>> Footprint(node_shard=1000, pending=4000).describe()
    'node shard 1,000, pending gradients 4,000'
    """

    node_shard: int = 0
    """What `Config.secondary` costs."""
    errors: int = 0
    """What `Config.error_feedback` costs."""
    pending: int = 0
    """Gradients that accumulate without cross-node sync."""

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def __add__(self, other: Footprint) -> Footprint:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Footprint(*(mine + theirs for mine, theirs in pairs))

    def describe(self) -> str:
        names = ("node shard", "kept errors", "pending gradients")
        parts = [f"{name} {size:,}" for name, size in zip(names, vars(self).values(), strict=True) if size]
        return ", ".join(parts) or "-"
