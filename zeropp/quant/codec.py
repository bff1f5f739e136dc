"""Codecs: what turns the rows of a buffer into the bytes of a hop, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .dispatch import implementation_for
from .formats import BlockFormat, RowOrder, align

if TYPE_CHECKING:
    from ..config import CodecName

QUANTIZABLE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class Codec(ABC):
    """Rows of numbers to rows of bytes. Stateless. Shapes and meaning as in reference.py."""

    @abstractmethod
    def row_bytes(self, numel: int) -> int:
        """Wire bytes of a row of `numel` elements."""

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

    def encode(
        self,
        source: Tensor,
        out: Tensor,
        order: RowOrder | None = None,
        seed: int | None = None,
        offset: int = 0,
    ) -> None:
        rows = source if order is None else source[list(order)]
        self._values(out, source.shape[1]).copy_(rows)
        out[:, source.shape[1] * self.wire_dtype.itemsize :] = 0

    def decode(self, encoded: Tensor, out: Tensor, order: RowOrder | None = None) -> None:
        values = self._values(encoded, out.shape[1])
        if order is None:
            out.copy_(values)
        else:
            out[list(order)] = values.to(out.dtype)

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
    """Sends block-quantized integers; see formats.py."""

    def __init__(self, fmt: BlockFormat) -> None:
        self.fmt = fmt

    def row_bytes(self, numel: int) -> int:
        return self.fmt.row_bytes(numel)

    @property
    def unrotated(self) -> BlockCodec:
        """The same bytes for what works in rotated space: decodes to, and encodes, rotated numbers.

        For sums that are kept between two hops: hop1.unrotated.decode_sum(...), hop2.unrotated.encode(...).
        """
        return BlockCodec(self.fmt.unrotated)

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
        into: BlockCodec,
        out: Tensor,
        numel: int,
        factor: float = 1.0,
        seed: int | None = None,
        offset: int = 0,
    ) -> None:
        """out = into.encode(factor * (encoded[0] + encoded[1] + ...)), in one pass.

        Between two codecs that rotate, it stays in rotated space.
        """
        implementation_for(out).recode(self.fmt, encoded, into.fmt, out, numel, factor, seed, offset)


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
