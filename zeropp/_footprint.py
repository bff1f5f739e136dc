"""Memory that zeropp holds on this rank between calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Footprint:
    """Bytes by purpose.

    >>> Footprint(node_shard=1000, pending=4000) + Footprint(errors=500)
    Footprint(node_shard=1000, errors=500, pending=4000)
    >>> Footprint(node_shard=1000, pending=4000).describe()
    'node shard 1,000, pending gradients 4,000'
    """

    node_shard: int = 0
    """Bytes that `Config.secondary` costs."""
    errors: int = 0
    """Bytes that `Config.error_feedback` costs."""
    pending: int = 0
    """Bytes of gradients that accumulate without cross-node sync."""

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return sum(vars(self).values())

    def __add__(self, other: Footprint) -> Footprint:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Footprint(*(mine + theirs for mine, theirs in pairs))

    def describe(self) -> str:
        """Return the bytes in words; purposes without bytes are left out."""
        names = ("node shard", "kept errors", "pending gradients")
        parts = [f"{name} {size:,}" for name, size in zip(names, vars(self).values(), strict=True) if size]
        return ", ".join(parts) or "-"
