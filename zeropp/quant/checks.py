"""Checks of the tensors that a kernel gets, which keep it from touching memory that it should not."""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import SCALE_BYTES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_values(name: str, values: Tensor) -> None:
    """Raise ValueError unless `values` [rows, S] can be encoded or decoded to."""
    if values.dtype not in DTYPES or not _has_contiguous_rows(values):
        raise ValueError(
            f"{name} is {values.dtype} with strides {values.stride()}; expected contiguous rows of fp32, bf16 "
            "or fp16"
        )


def check_encoded(name: str, encoded: Tensor, shape: tuple[int, ...], other: Tensor) -> None:
    """Raise ValueError unless `encoded` has this shape, is aligned, and is on the device of `other`."""
    if encoded.dtype != torch.uint8 or encoded.shape != shape or not _has_contiguous_rows(encoded):
        raise ValueError(
            f"{name} is {encoded.dtype} of shape {tuple(encoded.shape)} with strides {encoded.stride()}; "
            f"expected uint8 of shape {shape} with contiguous rows"
        )
    if any(distance % SCALE_BYTES for distance in (encoded.data_ptr(), *encoded.stride()[:-1])):
        raise ValueError(
            f"{name} has rows at odd addresses (strides {encoded.stride()}); expected multiples of "
            f"{SCALE_BYTES} bytes, for the scales"
        )
    if encoded.device != other.device:
        raise ValueError(
            f"{name} is on {encoded.device}, the other tensor on {other.device}; expected one device"
        )


def check_order(order: tuple[int, ...], rows: int) -> None:
    if sorted(order) != list(range(rows)):
        raise ValueError(f"order is {order}; expected a permutation of the {rows} rows")


def _has_contiguous_rows(tensor: Tensor) -> bool:
    return tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
