"""Copies of rows in another order, without an index tensor.

Indexing with a list uploads it, which waits for the device, and copies all rows once more. But the order of a
hop is regular: sorted by rail and then by node, ranks that are numbered node by node are a transpose. So an
order is cut into *grids*, row numbers that grow by one step inside and by another outside, and each grid is
one copy between two views. Whatever is not regular becomes grids of few rows, and is copied as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import Tensor

from .formats import RowOrder


@dataclass(frozen=True)
class Grid:
    """Row numbers first + i * outer_step + j * step, for i < outer and j < count, in this order."""

    first: int
    count: int = 1
    step: int = 1
    outer: int = 1
    outer_step: int = 1

    @property
    def rows(self) -> int:
        return self.outer * self.count

    def of(self, rows: Tensor) -> Tensor:
        """The rows of a tensor [R, S] that the grid has, as a view [outer, count, S]."""
        row, element = rows.stride()
        return rows.as_strided(
            (self.outer, self.count, rows.shape[1]),
            (self.outer_step * row, self.step * row, element),
            rows.storage_offset() + self.first * row,
        )


def gather_rows(source: Tensor, out: Tensor, order: RowOrder) -> None:
    """out[k] = source[order[k]], converted to the dtype of out. Both [R, S]."""
    for ordered, consecutive in _both(order):
        consecutive.of(out).copy_(ordered.of(source))


def scatter_rows(source: Tensor, out: Tensor, order: RowOrder) -> None:
    """out[order[k]] = source[k], converted to the dtype of out. Both [R, S]."""
    for ordered, consecutive in _both(order):
        ordered.of(out).copy_(consecutive.of(source))


def _both(order: RowOrder) -> Iterator[tuple[Grid, Grid]]:
    """Each grid of the order, and where it is in the order: as many rows, one after the other."""
    position = 0
    for grid in grids(tuple(order)):
        yield grid, Grid(position, grid.count, 1, grid.outer, grid.count)
        position += grid.rows


@lru_cache(maxsize=256)
def grids(order: tuple[int, ...]) -> tuple[Grid, ...]:
    """A permutation of rows as few grids.

    >>> grids((0, 2, 4, 1, 3, 5))  # three nodes of two ranks, in one copy
    (Grid(first=0, count=3, step=2, outer=2, outer_step=1),)
    """
    if sorted(order) != list(range(len(order))):
        raise ValueError(f"order is {order}; expected a permutation of the {len(order)} rows")
    lines: list[Grid] = []
    for number in order:
        step = number - (lines[-1].first + (lines[-1].count - 1) * lines[-1].step) if lines else 0
        # A view cannot go backwards.
        if lines and step > 0 and (lines[-1].count == 1 or lines[-1].step == step):
            lines[-1] = replace(lines[-1], count=lines[-1].count + 1, step=step)
        else:
            lines.append(Grid(number))
    merged: list[Grid] = []
    for line in lines:
        last = merged[-1] if merged else None
        if last is not None and (last.count, last.step) == (line.count, line.step):
            step = line.first - (last.first + (last.outer - 1) * last.outer_step)
            if step > 0 and (last.outer == 1 or last.outer_step == step):
                merged[-1] = replace(last, outer=last.outer + 1, outer_step=step)
                continue
        merged.append(line)
    return tuple(merged)
