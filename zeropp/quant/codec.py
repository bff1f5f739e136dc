"""Codecs: they turn the rows of a buffer into the bytes of a hop, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate as running_sums
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from . import cast
from .dispatch import implementation_for
from .formats import BlockFormat, CastFormat, RowOrder, Seed

if TYPE_CHECKING:
    from ..config import CodecName

QUANTIZABLE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})

Operation = Literal["encode", "decode", "decode_sum", "recode_from", "recode_to"]
"""A recode, which sums what one hop brought and encodes it for the next in one pass, counts under both."""


class Segment(NamedTuple):
    """Neighbouring columns of a row that are sent in one way."""

    numel: int
    block_size: int | None
    """Elements of a block; None for elements that are not quantized."""
    is_rotated: bool = False
    """Whether a format that rotates does so here."""
    offset: int = 0
    """Position of the first element in its parameter, which determines its noise."""


class Part(NamedTuple):
    """A segment of a row, and its format."""

    numel: int
    fmt: BlockFormat | CastFormat
    offset: int = 0


class Codec:
    """Turns rows of numbers into rows of bytes, segment by segment. Shapes and meaning as in reference.py.

    columns  [ a matrix      | two norms | another matrix ... ]
    bytes    [ int4 rotated  | as is     | int4 ...           ]     each starts at a multiple of 16 bytes
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        columns = _slices(part.numel for part in parts)
        in_row = _slices(part.fmt.row_bytes(part.numel) for part in parts)
        self._places = list(zip(parts, columns, in_row, strict=True))
        self._cut = [(part.numel, type(part.fmt)) for part in parts]
        self.numel = sum(part.numel for part in parts)
        """Elements of a row."""
        self.row_bytes = sum(part.fmt.row_bytes(part.numel) for part in parts)
        """Wire bytes of a row."""

    @property
    def rotates(self) -> bool:
        """Whether any segment is rotated."""
        return any(part.fmt.rotate for part in self.parts)

    @property
    def unrotated(self) -> Codec:
        """The codec of the same bytes in rotated space: decodes to, and encodes, rotated numbers.

        For sums between two hops: hop1.unrotated.decode_sum(...), hop2.unrotated.encode(...).
        """
        return Codec([part._replace(fmt=part.fmt.unrotated) for part in self.parts])

    def part(self, first: int, last: int) -> tuple[Codec, slice]:
        """Return the codec of columns `first` to `last` alone, and their bytes in an encoded row.

        Of a row of several segments, one must start at `first` and one must end at `last`.
        """
        if len(self.parts) == 1 and isinstance(fmt := self.parts[0].fmt, CastFormat):
            size = fmt.dtype.itemsize
            return Codec([Part(last - first, fmt)]), slice(first * size, last * size)
        parts = [place for place in self._places if first <= place[1].start and place[1].stop <= last]
        return Codec([part for part, _, _ in parts]), slice(parts[0][2].start, parts[-1][2].stop)

    def encode(self, source: Tensor, out: Tensor, order: RowOrder = None, seed: Seed = None) -> None:
        """out[k] = encoded source[order[k]].

        A codec that rounds at random needs a seed. Give every call another seed (derive it from step, rank
        and hop), but all pieces of a row the same: each segment has its own offset.
        """
        if source.shape[1] != self.numel:
            raise ValueError(f"a row has {source.shape[1]} elements; its segments have {self.numel}")
        for (_, fmt, offset), columns, at in self._places:
            _implementation(fmt, source).encode(fmt, source[:, columns], out[:, at], order, seed, offset)
        self.count("encode", source)

    def decode(self, encoded: Tensor, out: Tensor, order: RowOrder = None) -> None:
        """out[order[k]] = decoded encoded[k]."""
        for (_, fmt, _), columns, at in self._places:
            _implementation(fmt, out).decode(fmt, encoded[:, at], out[:, columns], order)
        self.count("decode", encoded)

    def decode_sum(self, encoded: Tensor, out: Tensor, factor: float = 1.0, accumulate: bool = False) -> None:
        """out (+)= factor * (encoded[0] + encoded[1] + ...), summed in fp32."""
        for (_, fmt, _), columns, at in self._places:
            _implementation(fmt, out).decode_sum(fmt, encoded[..., at], out[:, columns], factor, accumulate)
        self.count("decode_sum", encoded)

    def recode(
        self, encoded: Tensor, into: Codec, out: Tensor, factor: float = 1.0, seed: Seed = None
    ) -> None:
        """out = into.encode(factor * (encoded[0] + encoded[1] + ...)), in one pass if both have blocks."""
        if self._cut == into._cut:
            for ((numel, fmt, offset), _, at), (part, _, to) in zip(self._places, into._places, strict=True):
                recode = _implementation(fmt, out).recode
                recode(fmt, encoded[..., at], part.fmt, out[:, to], numel, factor, seed, offset)
        else:  # one of them casts whole rows
            total = torch.empty(encoded.shape[1], self.numel, device=encoded.device)
            Codec(self.parts).decode_sum(encoded, total, factor)  # a plain Codec does not count
            Codec(into.parts).encode(total, out, seed=seed)
        self.count("recode_from", encoded)
        into.count("recode_to", out)

    def count(self, operation: Operation, rows: Tensor) -> None:
        """Do nothing. A subclass may count operations, and the rows [..., width] that they read or wrote."""


def make_codec(
    name: CodecName,
    dtype: torch.dtype,
    segments: Sequence[Segment],
    rotate: bool = False,
    stochastic: bool = False,
) -> Codec:
    """Return the codec for rows of `dtype`. Only floats of 32 or 16 bits are cast or quantized.

    FSDP2 passes uint8 if a unit mixes dtypes. Quantizing those bytes would destroy them.
    """
    if name in ("none", "bf16") or dtype not in QUANTIZABLE_DTYPES:
        wire_dtype = torch.bfloat16 if name == "bf16" and dtype in QUANTIZABLE_DTYPES else dtype
        return Codec([Part(sum(segment.numel for segment in segments), CastFormat(wire_dtype))])
    bits = 8 if name == "int8" else 4
    return Codec(
        [
            Part(numel, BlockFormat(bits, block_size, rotate and is_rotated, stochastic), offset)
            if block_size is not None
            else Part(numel, CastFormat(dtype))
            for numel, block_size, is_rotated, offset in segments
        ]
    )


def _slices(lengths: Iterable[int]) -> list[slice]:
    return [slice(*ends) for ends in pairwise(running_sums(lengths, initial=0))]


def _implementation(fmt: BlockFormat | CastFormat, tensor: Tensor) -> ModuleType:
    return cast if isinstance(fmt, CastFormat) else implementation_for(tensor)
