"""The four operations of reference.py for elements that are cast, in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import CastFormat, RowOrder
from .permute_rows import gather_rows, scatter_rows


def encode(fmt: CastFormat, source: Tensor, out: Tensor, order: RowOrder = None, *_noise: object) -> None:
    numel = source.shape[1]
    gather_rows(source, _values(fmt, out, numel), order)
    out[:, numel * fmt.dtype.itemsize :].zero_()


def decode(fmt: CastFormat, encoded: Tensor, out: Tensor, order: RowOrder = None) -> None:
    scatter_rows(_values(fmt, encoded, out.shape[1]), out, order)


def decode_sum(
    fmt: CastFormat, encoded: Tensor, out: Tensor, factor: float = 1.0, accumulate: bool = False
) -> None:
    total = _values(fmt, encoded[0], out.shape[1]).to(torch.float32, copy=True)
    for sender in encoded[1:]:
        total += _values(fmt, sender, out.shape[1])
    total *= factor
    if accumulate:
        out += total
    else:
        out.copy_(total)


def recode(
    fmt: CastFormat,
    encoded: Tensor,
    into: CastFormat,
    out: Tensor,
    numel: int,
    factor: float,
    *_noise: object,
) -> None:
    total = torch.empty(encoded.shape[1], numel, device=encoded.device)
    decode_sum(fmt, encoded, total, factor)
    encode(into, total, out)


def _values(fmt: CastFormat, rows: Tensor, numel: int) -> Tensor:
    return rows[:, : numel * fmt.dtype.itemsize].view(fmt.dtype)
