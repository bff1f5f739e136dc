"""Column groups: the columns of a unit's weights that are sent together.

A shard [S] is the shards of the unit's parameters, one after the other. Parameters that no optimizer changes
(the base model under adapters) need to cross nodes only once. Parameters of different dtypes need different
codecs. So columns are grouped by dtype and by whether they are trained, even inside one FSDP2 unit:

    shard [S]         base | A B | base | A B | norm
    group 0 [S0]      base       | base       | norm     not trained, bf16
    group 1 [S1]             A B |        A B            trained, fp32

Each group is packed into a separate shard and gathered like a separate unit. The usual unit has one group:
the whole shard. If dtypes are mixed, FSDP2 passes raw bytes, and columns are bytes.

[Note: Regrouping]
`requires_grad` is read when zeropp is applied, and again at each optimizer step that concerns the unit. It is
never read in between: frameworks freeze adapters for one forward of a reference model. If a group now has
trained and frozen parameters, it is split permanently, and the unit is sent again once. Training that
alternates between two adapters pays for this at the first change only. All ranks run the same steps and
freeze the same parameters, so they split alike. Grouping affects block boundaries and how much is resent,
never correctness: a group in which any parameter may have changed is sent.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Weight(NamedTuple):
    """A parameter's part of a shard."""

    numel: int
    dtype: torch.dtype
    """Dtype in which FSDP2 gathers it."""
    is_trained: bool = True


Split = tuple[bool, ...]
"""For each parameter of the unit, whether it was trained at one point in time."""


class Stretch(NamedTuple):
    """Columns that are adjacent in the buffer and in the group."""

    columns: slice
    """Columns of the buffer."""
    at: slice
    """Elements of the group's packed shard."""

    def columns_of(self, first: int, last: int) -> slice:
        """Return the columns of elements `first` to `last` of the packed shard."""
        # Columns per element: 1, or the size of an element in bytes where FSDP2 passes raw bytes.
        width = (self.columns.stop - self.columns.start) // (self.at.stop - self.at.start)
        start = self.columns.start + (first - self.at.start) * width
        return slice(start, start + (last - first) * width)


@dataclass(frozen=True)
class ColumnGroup:
    """Columns of one dtype that are sent together; see the top of this file."""

    dtype: torch.dtype
    stretches: tuple[Stretch, ...]
    lengths: tuple[int, ...] = ()
    """Elements of each parameter of the group; empty if unknown."""
    members: frozenset[int] | None = None
    """Indices of the group's parameters in the unit; None: all."""

    @property
    def numel(self) -> int:
        """Elements of the packed shard."""
        end: int = self.stretches[-1].at.stop
        return end

    @property
    def edges(self) -> tuple[int, ...]:
        """Positions in the packed shard where one stretch ends and the next begins."""
        return tuple(stretch.at.start for stretch in self.stretches[1:])

    def has_any_of(self, parameters: Collection[int] | None) -> bool:
        """Whether the group has any of these parameters of the unit (None: all parameters)."""
        return parameters is None or self.members is None or not self.members.isdisjoint(parameters)

    def is_split_by(self, split: Split) -> bool:
        """Whether some parameters of the group are trained and others are not."""
        return self.members is not None and len({split[index] for index in self.members}) > 1

    def pack(self, shard: Tensor) -> Tensor:
        """Return the group's part of a shard [S]: a view if possible."""
        pieces = [shard[stretch.columns] for stretch in self.stretches]
        packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if not _can_view(packed, self.dtype):  # raw bytes at an unaligned address; a clone is aligned
            packed = packed.clone()
        return packed.view(self.dtype)


def column_groups(
    weights: Sequence[Weight], splits: Sequence[Split], numel: int, dtype: torch.dtype
) -> tuple[ColumnGroup, ...]:
    """Return the column groups of a buffer, in the order of their first columns.

    >>> base, adapter = Weight(100, torch.bfloat16, False), Weight(8, torch.bfloat16)
    >>> weights = [base, adapter, base, adapter]
    >>> for group in column_groups(weights, [split_of(weights)], 216, torch.bfloat16):
    ...     print(group.members, [(s.columns.start, s.columns.stop) for s in group.stretches], group.edges)
    frozenset({0, 2}) [(0, 100), (108, 208)] (100,)
    frozenset({1, 3}) [(100, 108), (208, 216)] (8,)

    If `weights` do not match the buffer, the whole buffer is one group.
    """
    if buffer_of(weights) != (numel, dtype):
        return (ColumnGroup(dtype, (Stretch(slice(0, numel), slice(0, numel)),)),)
    # One key per dtype and history of requires_grad: parameters that differed once stay in separate groups.
    members: dict[tuple[torch.dtype, tuple[bool, ...]], list[int]] = {}
    for index, weight in enumerate(weights):
        members.setdefault((weight.dtype, tuple(split[index] for split in splits)), []).append(index)
    starts = _starts(weights, in_bytes=len({weight.dtype for weight in weights}) > 1)
    return tuple(
        ColumnGroup(
            of, _stretches(weights, starts, mine), tuple(weights[i].numel for i in mine), frozenset(mine)
        )
        for (of, _), mine in members.items()
        if any(weights[i].numel for i in mine)  # a group without elements has no stretch
    )


def split_of(weights: Sequence[Weight]) -> Split:
    """Return which parameters are trained now."""
    return tuple(weight.is_trained for weight in weights)


def buffer_of(weights: Sequence[Weight]) -> tuple[int, torch.dtype]:
    """Return the elements of a shard as FSDP2 passes it, and their dtype: bytes if dtypes are mixed."""
    dtypes = {weight.dtype for weight in weights}
    if len(dtypes) == 1:
        return sum(weight.numel for weight in weights), dtypes.pop()
    return sum(weight.numel * weight.dtype.itemsize for weight in weights), torch.uint8


def columns_as(dtype: torch.dtype, columns: Tensor) -> Tensor | None:
    """Return columns [W, S] of a buffer viewed as another dtype; None if they are not aligned for it."""
    return columns.view(dtype) if _can_view(columns, dtype) else None


def _can_view(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether every row of `x` starts at a multiple of the dtype's size, which `Tensor.view(dtype)` needs."""
    if x.dtype == dtype:
        return True
    steps = (x.storage_offset(), *x.stride()[:-1])
    return all(step * x.itemsize % dtype.itemsize == 0 for step in steps)


def _starts(weights: Sequence[Weight], in_bytes: bool) -> list[int]:
    """Return the first column of each parameter, and the end of the last one."""
    starts = [0]
    for weight in weights:
        starts.append(starts[-1] + weight.numel * (weight.dtype.itemsize if in_bytes else 1))
    return starts


def _stretches(
    weights: Sequence[Weight], starts: Sequence[int], members: Sequence[int]
) -> tuple[Stretch, ...]:
    """Return the stretches of these parameters. Adjacent parameters share one stretch."""
    found: list[Stretch] = []
    position = 0
    for index in members:
        columns, at = (
            slice(starts[index], starts[index + 1]),
            slice(position, position + weights[index].numel),
        )
        position = at.stop
        if at.start == at.stop:
            continue
        if found and found[-1].columns.stop == columns.start:
            last = found.pop()
            columns, at = slice(last.columns.start, columns.stop), slice(last.at.start, at.stop)
        found.append(Stretch(columns, at))
    return tuple(found)
