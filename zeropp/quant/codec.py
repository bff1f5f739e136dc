"""Codecs: what turns the rows of a buffer into the bytes of a hop, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .dispatch import implementation_for
from .formats import BlockFormat, RowOrder, align
from .permute_rows import gather_rows, scatter_rows

if TYPE_CHECKING:
    from ..config import CodecName

QUANTIZABLE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class Codec(ABC):
    """Rows of numbers to rows of bytes. Stateless. Shapes and meaning as in reference.py."""

    @abstractmethod
    def row_bytes(self, numel: int) -> int:
        """Wire bytes of a row of `numel` elements."""

    @property
    @abstractmethod
    def unrotated(self) -> Codec:
        """The same bytes for what works in rotated space: decodes to, and encodes, rotated numbers.

        For sums between two hops: hop1.unrotated.decode_sum(...), hop2.unrotated.encode(...).
        """

    @abstractmethod
    def part(self, first: int, last: int) -> tuple[Codec, slice]:
        """For columns `first` to `last` of a row: the codec that decodes them alone, and their bytes in an
        encoded row. A segment must start at `first`, and one must end at `last`."""

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
        offset. Give every call another seed (derive it from step, rank and hop), but all pieces of a row the
        same, each with the column it starts at as its offset.
        """

    @abstractmethod
    def decode(self, encoded: Tensor, out: Tensor, order: RowOrder | None = None) -> None:
        """out[order[k]] = decoded encoded[k]."""

    @abstractmethod
    def decode_sum(self, encoded: Tensor, out: Tensor, factor: float = 1.0, accumulate: bool = False) -> None:
        """out (+)= factor * (encoded[0] + encoded[1] + ...), summed in fp32."""

    def recode(
        self,
        encoded: Tensor,
        into: Codec,
        out: Tensor,
        numel: int,
        factor: float = 1.0,
        seed: int | None = None,
        offset: int = 0,
    ) -> None:
        """out = into.encode(factor * (encoded[0] + encoded[1] + ...)), for rows of `numel` elements."""
        total = torch.empty(encoded.shape[1], numel, device=encoded.device)
        self.decode_sum(encoded, total, factor)
        into.encode(total, out, None, seed, offset)


class CastCodec(Codec):
    """Sends each element as `wire_dtype`: the buffer's own dtype ("none"), or bf16."""

    def __init__(self, wire_dtype: torch.dtype) -> None:
        self.wire_dtype = wire_dtype

    def row_bytes(self, numel: int) -> int:
        return align(numel * self.wire_dtype.itemsize)

    @property
    def unrotated(self) -> CastCodec:
        return self

    def part(self, first: int, last: int) -> tuple[CastCodec, slice]:
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
    """Sends a row as block-quantized integers of one format; see formats.py."""

    def __init__(self, fmt: BlockFormat) -> None:
        self.fmt = fmt

    def row_bytes(self, numel: int) -> int:
        return self.fmt.row_bytes(numel)

    @property
    def unrotated(self) -> BlockCodec:
        return BlockCodec(self.fmt.unrotated)

    def part(self, first: int, last: int) -> tuple[Codec, slice]:
        raise ValueError("a row of blocks has no parts; give it segments")

    def encode(
        self,
        source: Tensor,
        out: Tensor,
        order: RowOrder | None = None,
        seed: int | None = None,
        offset: int = 0,
    ) -> None:
        implementation_for(source).encode(self.fmt, source, out, order, seed, offset)

    def decode(self, encoded: Tensor, out: Tensor, order: RowOrder | None = None) -> None:
        implementation_for(out).decode(self.fmt, encoded, out, order)

    def decode_sum(self, encoded: Tensor, out: Tensor, factor: float = 1.0, accumulate: bool = False) -> None:
        implementation_for(out).decode_sum(self.fmt, encoded, out, factor, accumulate)

    def recode(
        self,
        encoded: Tensor,
        into: Codec,
        out: Tensor,
        numel: int,
        factor: float = 1.0,
        seed: int | None = None,
        offset: int = 0,
    ) -> None:
        """In one pass between two formats of blocks; if both rotate, in rotated space."""
        if not isinstance(into, BlockCodec):
            super().recode(encoded, into, out, numel, factor, seed, offset)
            return
        implementation = implementation_for(out)
        implementation.recode(self.fmt, encoded, into.fmt, out, numel, factor, seed, offset)


class Segment(NamedTuple):
    """Neighbouring columns of a row that are sent in one way."""

    numel: int
    block_size: int | None
    """Elements of a block; None: they are sent as they are."""
    is_rotated: bool = False
    """Whether a format that rotates does so here."""
    offset: int = 0
    """Position of the first element in its parameter, from which its noise follows."""


class Part(NamedTuple):
    """A segment's place in a row, and its codec."""

    columns: slice
    at: slice
    """Its bytes in an encoded row."""
    codec: CastCodec | BlockCodec
    segment: Segment


class SegmentCodec(Codec):
    """Sends each segment of a row in its own way, one after the other:

    columns  [ a matrix      | two norms | another matrix ... ]
    bytes    [ int4 rotated  | as is     | int4 ...           ]     each starts at a multiple of 16 bytes
    """

    def __init__(self, parts: Sequence[tuple[Segment, CastCodec | BlockCodec]]) -> None:
        self.parts: list[Part] = []
        column, byte = 0, 0
        for segment, codec in parts:
            last, end = column + segment.numel, byte + codec.row_bytes(segment.numel)
            self.parts.append(Part(slice(column, last), slice(byte, end), codec, segment))
            column, byte = last, end
        self._numel, self._row_bytes = column, byte

    def row_bytes(self, numel: int) -> int:
        if numel != self._numel:
            raise ValueError(f"a row has {numel} elements; its segments have {self._numel}")
        return self._row_bytes

    @property
    def unrotated(self) -> SegmentCodec:
        return SegmentCodec([(part.segment, part.codec.unrotated) for part in self.parts])

    def part(self, first: int, last: int) -> tuple[SegmentCodec, slice]:
        inside = [p for p in self.parts if first <= p.columns.start and p.columns.stop <= last]
        alone = SegmentCodec([(part.segment, part.codec) for part in inside])
        return alone, slice(inside[0].at.start, inside[-1].at.stop)

    def encode(
        self,
        source: Tensor,
        out: Tensor,
        order: RowOrder | None = None,
        seed: int | None = None,
        offset: int = 0,
    ) -> None:
        for columns, at, codec, segment in self.parts:
            codec.encode(source[:, columns], out[:, at], order, seed, offset + segment.offset)

    def decode(self, encoded: Tensor, out: Tensor, order: RowOrder | None = None) -> None:
        for columns, at, codec, _ in self.parts:
            codec.decode(encoded[:, at], out[:, columns], order)

    def decode_sum(self, encoded: Tensor, out: Tensor, factor: float = 1.0, accumulate: bool = False) -> None:
        for columns, at, codec, _ in self.parts:
            codec.decode_sum(encoded[..., at], out[:, columns], factor, accumulate)

    def recode(
        self,
        encoded: Tensor,
        into: Codec,
        out: Tensor,
        numel: int,
        factor: float = 1.0,
        seed: int | None = None,
        offset: int = 0,
    ) -> None:
        """Segment by segment, if `into` has the same ones."""
        if not isinstance(into, SegmentCodec):
            super().recode(encoded, into, out, numel, factor, seed, offset)
            return
        for part, other in zip(self.parts, into.parts, strict=True):
            start = offset + part.segment.offset
            arrived, sent = encoded[..., part.at], out[:, other.at]
            part.codec.recode(arrived, other.codec, sent, part.segment.numel, factor, seed, start)


def make_codec(
    name: CodecName,
    dtype: torch.dtype,
    block_size: int,
    rotate: bool = False,
    stochastic: bool = False,
    segments: Sequence[Segment] = (),
) -> Codec:
    """The codec for buffers of `dtype`. What is not a float of 32 or 16 bits is sent as it is.

    block_size, rotate, stochastic and segments are about integers, and have no effect on "none" and "bf16".
    Without segments, rows of any length have blocks of `block_size`.

    FSDP2 passes uint8 when a unit mixes dtypes; quantizing those bytes would destroy them.
    """
    if name == "none" or dtype not in QUANTIZABLE_DTYPES:
        return CastCodec(dtype)
    if name == "bf16":
        return CastCodec(torch.bfloat16)
    whole = BlockFormat(8 if name == "int8" else 4, block_size, rotate, stochastic)
    if not segments:
        return BlockCodec(whole)
    return SegmentCodec([(segment, _codec_of(segment, whole, dtype)) for segment in segments])


def _codec_of(segment: Segment, whole: BlockFormat, dtype: torch.dtype) -> CastCodec | BlockCodec:
    if segment.block_size is None:
        return CastCodec(dtype)
    is_rotated = whole.rotate and segment.is_rotated
    return BlockCodec(replace(whole, block_size=segment.block_size, rotate=is_rotated))
