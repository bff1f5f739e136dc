"""Codecs: what turns the rows of a buffer into the bytes of a hop, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .dispatch import implementation_for
from .formats import BlockFormat, RowOrder, align
from .row_copies import gather_rows, scatter_rows

if TYPE_CHECKING:
    from ..config import CodecName

QUANTIZABLE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class Codec(ABC):
    """Rows of numbers to rows of bytes. Stateless. Shapes and meaning as in reference.py."""

    @abstractmethod
    def row_bytes(self, numel: int) -> int:
        """Wire bytes of a row of `numel` elements."""

    def with_block_starts(self, starts: tuple[int, ...]) -> Codec:
        """This codec for rows in which a new block starts at each of `starts`, in ascending order."""
        return self  # no blocks

    @abstractmethod
    def part(self, numel: int, first: int, last: int) -> tuple[Codec, slice]:
        """For columns `first` to `last` of rows of `numel` elements: the codec that decodes them alone, and
        their bytes in an encoded row. If there are blocks, one must start at each of both."""

    @abstractmethod
    def encode(
        self,
        source: Tensor,
        out: Tensor,
        order: RowOrder | None = None,
        seed: int | None = None,
        offset: int = 0,
    ) -> None:
        """out[k] = encoded source[order[k]].

        A codec that rounds at random needs a seed; all others round to nearest and look at neither seed nor
        offset. Give every call another seed (derive it from step, rank, unit and hop), but all chunks of a
        buffer the same, each with the column it starts at as its offset.
        """

    @abstractmethod
    def decode(self, encoded: Tensor, out: Tensor, order: RowOrder | None = None) -> None:
        """out[order[k]] = decoded encoded[k]."""

    @abstractmethod
    def decode_sum(self, encoded: Tensor, out: Tensor, factor: float = 1.0, accumulate: bool = False) -> None:
        """out (+)= factor * (encoded[0] + encoded[1] + ...), summed in fp32."""


class CastCodec(Codec):
    """Sends each element as `wire_dtype`: the buffer's own dtype ("none"), or bf16."""

    def __init__(self, wire_dtype: torch.dtype) -> None:
        self.wire_dtype = wire_dtype

    def row_bytes(self, numel: int) -> int:
        return align(numel * self.wire_dtype.itemsize)

    def part(self, numel: int, first: int, last: int) -> tuple[CastCodec, slice]:
        return self, slice(first * self.wire_dtype.itemsize, last * self.wire_dtype.itemsize)

    def encode(
        self,
        source: Tensor,
        out: Tensor,
        order: RowOrder | None = None,
        seed: int | None = None,
        offset: int = 0,
    ) -> None:
        values = self._values(out, source.shape[1])
        if order is None:
            values.copy_(source)
        else:
            gather_rows(source, values, order)
        out[:, source.shape[1] * self.wire_dtype.itemsize :].zero_()

    def decode(self, encoded: Tensor, out: Tensor, order: RowOrder | None = None) -> None:
        values = self._values(encoded, out.shape[1])
        if order is None:
            out.copy_(values)
        else:
            scatter_rows(values, out, order)

    def decode_sum(self, encoded: Tensor, out: Tensor, factor: float = 1.0, accumulate: bool = False) -> None:
        total = self._values(encoded[0], out.shape[1]).to(torch.float32, copy=True)
        for sender in encoded[1:]:
            total += self._values(sender, out.shape[1])
        total *= factor
        if accumulate:
            out += total
        else:
            out.copy_(total)

    def _values(self, rows: Tensor, numel: int) -> Tensor:
        return rows[:, : numel * self.wire_dtype.itemsize].view(self.wire_dtype)


class BlockCodec(Codec):
    """Sends block-quantized integers; see formats.py.

    A row in which blocks must start at certain columns is sent as several, one after the other:

        columns  [ 0 ... first start | ... second start | ... S ]
        bytes    [ a row of formats.py | another one | a third ]
    """

    def __init__(self, fmt: BlockFormat, block_starts: tuple[int, ...] = ()) -> None:
        self.fmt = fmt
        self.block_starts = block_starts
        self._known_parts: dict[int, tuple[tuple[slice, slice], ...]] = {}

    def row_bytes(self, numel: int) -> int:
        end: int = self._parts(numel)[-1][1].stop
        return end

    def with_block_starts(self, starts: tuple[int, ...]) -> BlockCodec:
        return BlockCodec(self.fmt, starts)

    def part(self, numel: int, first: int, last: int) -> tuple[BlockCodec, slice]:
        inside = [at for columns, at in self._parts(numel) if first <= columns.start and columns.stop <= last]
        starts = tuple(start - first for start in self.block_starts if first < start < last)
        return self.with_block_starts(starts), slice(inside[0].start, inside[-1].stop)

    @property
    def unrotated(self) -> BlockCodec:
        """The same bytes for what works in rotated space: decodes to, and encodes, rotated numbers.

        For sums that are kept between two hops: hop1.unrotated.decode_sum(...), hop2.unrotated.encode(...).
        """
        return BlockCodec(self.fmt.unrotated, self.block_starts)

    def encode(
        self,
        source: Tensor,
        out: Tensor,
        order: RowOrder | None = None,
        seed: int | None = None,
        offset: int = 0,
    ) -> None:
        implementation = implementation_for(source)
        for columns, at in self._parts(source.shape[1]):
            start = offset + columns.start
            implementation.encode(self.fmt, source[:, columns], out[:, at], order, seed, start)

    def decode(self, encoded: Tensor, out: Tensor, order: RowOrder | None = None) -> None:
        implementation = implementation_for(out)
        for columns, at in self._parts(out.shape[1]):
            implementation.decode(self.fmt, encoded[:, at], out[:, columns], order)

    def decode_sum(self, encoded: Tensor, out: Tensor, factor: float = 1.0, accumulate: bool = False) -> None:
        implementation = implementation_for(out)
        for columns, at in self._parts(out.shape[1]):
            implementation.decode_sum(self.fmt, encoded[..., at], out[:, columns], factor, accumulate)

    def recode(
        self,
        encoded: Tensor,
        into: BlockCodec,
        out: Tensor,
        numel: int,
        factor: float = 1.0,
        seed: int | None = None,
        offset: int = 0,
    ) -> None:
        """out = into.encode(factor * (encoded[0] + encoded[1] + ...)), in one pass.

        Between two codecs that rotate, it stays in rotated space. Both must have the same block starts.
        """
        if into.block_starts != self.block_starts:
            raise ValueError(
                f"block_starts is {into.block_starts} in the other codec; expected {self.block_starts}"
            )
        implementation = implementation_for(out)
        for (columns, at), (_, into_at) in zip(self._parts(numel), into._parts(numel), strict=True):
            size, start = columns.stop - columns.start, offset + columns.start
            implementation.recode(
                self.fmt, encoded[..., at], into.fmt, out[:, into_at], size, factor, seed, start
            )

    def _parts(self, numel: int) -> tuple[tuple[slice, slice], ...]:
        """Columns from one block start to the next, and where in an encoded row they are."""
        parts = self._known_parts.get(numel)
        if parts is not None:
            return parts
        if self.block_starts and self.block_starts[-1] >= numel:
            raise ValueError(
                f"block_starts is {self.block_starts}; expected columns of a row of {numel} elements"
            )
        found, position = [], 0
        for start, stop in pairwise((0, *self.block_starts, numel)):
            end = position + self.fmt.row_bytes(stop - start)
            found.append((slice(start, stop), slice(position, end)))
            position = end
        parts = self._known_parts[numel] = tuple(found)
        return parts


def make_codec(
    name: CodecName, dtype: torch.dtype, block_size: int, rotate: bool = False, stochastic: bool = False
) -> Codec:
    """The codec for buffers of `dtype`. What is not a float of 32 or 16 bits is sent as it is.

    rotate and stochastic are about integers: "none" and "bf16" are the same with and without them.

    FSDP2 passes uint8 when a unit mixes dtypes; quantizing those bytes would destroy them.
    """
    if name == "none" or dtype not in QUANTIZABLE_DTYPES:
        return CastCodec(dtype)
    if name == "bf16":
        return CastCodec(torch.bfloat16)
    bits = 8 if name == "int8" else 4
    return BlockCodec(BlockFormat(bits, block_size, rotate, stochastic))
