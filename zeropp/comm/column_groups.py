"""The columns of a unit's weights, in groups that are sent together.

A shard is its parameters' shards, one after the other. Those that no optimizer changes (the base of a model
under adapters) need to cross nodes once, and parameters of another dtype need another codec. So columns are
grouped by both, whatever a framework has wrapped together:

    shard [S]         base | A B | base | A B | norm
    group 0 [S0]      base       | base       | norm     not trained, bf16
    group 1 [S1]             A B |        A B            trained, fp32

Each group is packed into a shard of its own, and gathered as if it were a unit of its own. The usual unit has
one group, which is the shard itself. If dtypes are mixed, FSDP2 passes raw bytes, and columns are bytes.

[Note: Regrouping]
What is trained is read when zeropp is applied, and again at each optimizer step that concerns the unit, never
in between: frameworks freeze adapters for one forward of a reference model. If some of a group are trained
now and others are not, it is split for good, and the unit sent anew, once: who goes back and forth between
two adapters pays for it at the first change only. All ranks run the same steps, and freeze the same
parameters. Groups decide where blocks start and what is sent again, not on what is true: a group in which
anything can have changed is sent, whatever was thought of it before.
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
    """What it is gathered in."""
    is_trained: bool = True


Split = tuple[bool, ...]
"""Which parameters were trained at some time."""


class Stretch(NamedTuple):
    """Columns that are neighbours in the buffer, and in the group."""

    columns: slice
    """Where they are in the buffer."""
    at: slice
    """Where they are in the group's packed shard, in elements."""

    def columns_of(self, first: int, last: int) -> slice:
        """The columns of elements `first` to `last` of the packed shard."""
        width = (self.columns.stop - self.columns.start) // (self.at.stop - self.at.start)
        start = self.columns.start + (first - self.at.start) * width
        return slice(start, start + (last - first) * width)


@dataclass(frozen=True)
class ColumnGroup:
    """Columns of one dtype that are sent together."""

    dtype: torch.dtype
    stretches: tuple[Stretch, ...]
    lengths: tuple[int, ...] = ()
    """Elements of each of its parameters; empty if they are not known."""
    members: frozenset[int] | None = None
    """Which parameters of the unit they are; None: all."""

    @property
    def numel(self) -> int:
        """Elements of a packed shard."""
        end: int = self.stretches[-1].at.stop
        return end

    @property
    def edges(self) -> tuple[int, ...]:
        """Where in the packed shard one stretch ends and the next begins."""
        return tuple(stretch.at.start for stretch in self.stretches[1:])

    def has_any_of(self, parameters: Collection[int] | None) -> bool:
        """Whether any of these parameters of the unit, or of all of them, is in the group."""
        return parameters is None or self.members is None or not self.members.isdisjoint(parameters)

    def is_split_by(self, split: Split) -> bool:
        """Whether some of its parameters are trained and others are not."""
        return self.members is not None and len({split[index] for index in self.members}) > 1

    def pack(self, shard: Tensor) -> Tensor:
        """The group's part of a shard [S]: a view if it can be one."""
        pieces = [shard[stretch.columns] for stretch in self.stretches]
        packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if not _can_view(packed, self.dtype):
            packed = packed.clone()
        return packed.view(self.dtype)


def column_groups(
    weights: Sequence[Weight], splits: Sequence[Split], numel: int, dtype: torch.dtype
) -> tuple[ColumnGroup, ...]:
    """The groups of a buffer, in the order of their first columns.

    >>> base, adapter = Weight(100, torch.bfloat16, False), Weight(8, torch.bfloat16)
    >>> weights = [base, adapter, base, adapter]
    >>> for group in column_groups(weights, [split_of(weights)], 216, torch.bfloat16):
    ...     print(group.members, [(s.columns.start, s.columns.stop) for s in group.stretches], group.edges)
    frozenset({0, 2}) [(0, 100), (108, 208)] (100,)
    frozenset({1, 3}) [(100, 108), (208, 216)] (8,)

    If `weights` do not fill the buffer, it is one group.
    """
    if buffer_of(weights) != (numel, dtype):
        return (ColumnGroup(dtype, (Stretch(slice(0, numel), slice(0, numel)),)),)
    members: dict[tuple[torch.dtype, tuple[bool, ...]], list[int]] = {}
    for index, weight in enumerate(weights):
        members.setdefault((weight.dtype, tuple(split[index] for split in splits)), []).append(index)
    starts = _starts(weights, in_bytes=len({weight.dtype for weight in weights}) > 1)
    return tuple(
        ColumnGroup(
            of, _stretches(weights, starts, mine), tuple(weights[i].numel for i in mine), frozenset(mine)
        )
        for (of, _), mine in members.items()
        if any(weights[i].numel for i in mine)
    )


def split_of(weights: Sequence[Weight]) -> Split:
    """What is trained now."""
    return tuple(weight.is_trained for weight in weights)


def buffer_of(weights: Sequence[Weight]) -> tuple[int, torch.dtype]:
    """Elements of a shard as FSDP2 passes it, and their dtype: bytes, if there are several."""
    dtypes = {weight.dtype for weight in weights}
    if len(dtypes) == 1:
        return sum(weight.numel for weight in weights), dtypes.pop()
    return sum(weight.numel * weight.dtype.itemsize for weight in weights), torch.uint8


def columns_as(dtype: torch.dtype, columns: Tensor) -> Tensor | None:
    """Columns [W, S] of a buffer as elements of another dtype; None if they do not lie as those must."""
    return columns.view(dtype) if _can_view(columns, dtype) else None


def _can_view(x: Tensor, dtype: torch.dtype) -> bool:
    if x.dtype == dtype:
        return True
    steps = (x.storage_offset(), *x.stride()[:-1])
    return all(step * x.itemsize % dtype.itemsize == 0 for step in steps)


def _starts(weights: Sequence[Weight], in_bytes: bool) -> list[int]:
    """The column that each parameter starts at, and the end of the last one."""
    starts = [0]
    for weight in weights:
        starts.append(starts[-1] + weight.numel * (weight.dtype.itemsize if in_bytes else 1))
    return starts


def _stretches(
    weights: Sequence[Weight], starts: Sequence[int], members: Sequence[int]
) -> tuple[Stretch, ...]:
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
