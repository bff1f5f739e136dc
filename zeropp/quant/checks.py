"""What all kernels share: checks of tensors, which keep kernels from touching memory that they should not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .formats import SCALE_BYTES, BlockFormat, RowOrder

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def decode_by(decode_sum: Callable[..., None]) -> Callable[..., None]:
    """Return `decode` of reference.py: a sum of one sender."""

    def decode(fmt: BlockFormat, encoded: Tensor, out: Tensor, order: RowOrder = None) -> None:
        decode_sum(fmt, encoded.unsqueeze(0), out, order=order)

    return decode


def check_encode(fmt: BlockFormat, source: Tensor, out: Tensor) -> tuple[int, int]:
    """Return rows and their elements."""
    rows, numel = source.shape
    _check_values("source", source)
    _check_encoded("out", out, (rows, fmt.row_bytes(numel)), source)
    return rows, numel


def check_decode_sum(fmt: BlockFormat, encoded: Tensor, out: Tensor) -> tuple[int, int, int]:
    """Return senders, rows and their elements."""
    rows, numel = out.shape
    _check_values("out", out)
    _check_encoded("encoded", encoded, (max(len(encoded), 1), rows, fmt.row_bytes(numel)), out)
    return len(encoded), rows, numel


def check_recode(
    fmt: BlockFormat, encoded: Tensor, into: BlockFormat, out: Tensor, numel: int
) -> tuple[int, int]:
    """Return senders and rows."""
    senders, rows, _ = encoded.shape
    _check_encoded("encoded", encoded, (max(senders, 1), rows, fmt.row_bytes(numel)), out)
    _check_encoded("out", out, (rows, into.row_bytes(numel)), encoded)
    return senders, rows


def check_order(order: tuple[int, ...], rows: int) -> None:
    if sorted(order) != list(range(rows)):
        raise ValueError(f"order is {order}; expected a permutation of the {rows} rows")


def _check_values(name: str, values: Tensor) -> None:
    if values.dtype not in DTYPES or not _has_contiguous_rows(values):
        raise ValueError(
            f"{name} is {values.dtype} with strides {values.stride()}; expected contiguous rows of fp32, "
            "bf16 or fp16"
        )


def _check_encoded(name: str, encoded: Tensor, shape: tuple[int, ...], other: Tensor) -> None:
    if encoded.dtype != torch.uint8 or encoded.shape != shape or not _has_contiguous_rows(encoded):
        raise ValueError(
            f"{name} is {encoded.dtype} of shape {tuple(encoded.shape)} with strides {encoded.stride()}; "
            f"expected uint8 of shape {shape} with contiguous rows"
        )
    strides = encoded.stride()
    if shape[-1] and (encoded.data_ptr() | strides[0] | strides[-2]) % SCALE_BYTES:
        raise ValueError(
            f"{name} has rows at odd addresses (strides {strides}); expected multiples of "
            f"{SCALE_BYTES} bytes, for the scales"
        )
    if encoded.device != other.device:
        raise ValueError(
            f"{name} is on {encoded.device}, the other tensor on {other.device}; expected one device"
        )


def _has_contiguous_rows(tensor: Tensor) -> bool:
    return tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
