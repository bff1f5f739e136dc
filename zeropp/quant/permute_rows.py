"""Copies of rows in another order, without an index tensor.

Indexing with a list uploads it, which waits for the device, and copies all rows once more. But if ranks are
numbered node by node, the order of a hop is a transpose, which is one copy between two views. In any other
order, rows are copied one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from torch import Tensor

from .checks import check_order
from .formats import RowOrder


def gather_rows(source: Tensor, out: Tensor, order: RowOrder) -> None:
    """out[k] = source[order[k]], converted to the dtype of out. Both [R, S]."""
    for ordered, consecutive in _pairs(source, out, order):
        consecutive.copy_(ordered)


def scatter_rows(source: Tensor, out: Tensor, order: RowOrder) -> None:
    """out[order[k]] = source[k], converted to the dtype of out. Both [R, S]."""
    for ordered, consecutive in _pairs(out, source, order):
        ordered.copy_(consecutive)


def _pairs(ordered: Tensor, consecutive: Tensor, order: RowOrder) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of rows order[k] of one tensor and of rows k of the other."""
    if order is None:
        yield ordered, consecutive
    elif width := transposed_width(tuple(order)):
        height, numel = len(order) // width, ordered.shape[1]
        yield ordered.view(height, width, numel).transpose(0, 1), consecutive.view(width, height, numel)
    else:
        for k, row in enumerate(order):
            yield ordered[row], consecutive[k]


@lru_cache(maxsize=256)
def transposed_width(order: tuple[int, ...]) -> int:
    """Return w if the order transposes a matrix [R / w, w] of row numbers, or 0.

    >>> transposed_width((0, 2, 4, 1, 3, 5))  # three nodes of two ranks
    2
    """
    rows = len(order)
    check_order(order, rows)
    width = order[1] - order[0] if rows > 1 else rows
    if width <= 0 or rows % width:
        return 0
    transposed = tuple(row for first in range(width) for row in range(first, rows, width))
    return width if order == transposed else 0
