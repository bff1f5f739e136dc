"""Block quantization on the CPU, at memory speed: reference.py bit for bit, in one pass and without copies.

The work is in kernels.py. Here are the checks that keep it from touching memory it should not, and the
threads: as many as torch uses, each calling the same kernel, which releases the GIL, on its share of the
tiles. Any number of Python threads may call these functions at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..formats import SCALE_BYTES, BlockFormat, RowOrder
from ..noise import seed_key
from . import kernels as cpu_kernels
from .intrinsics import LANES

# Elements a kernel works on at once, at least: enough blocks to hide the latency of their scales, ...
ENCODE_TILE_SIZE = 2048
# ... and where there are none to find, few, so that reads and writes of memory alternate.
DECODE_TILE_SIZE = 256
# Several shares per thread, because cores are not equally fast, but none too small to be worth handing out.
SHARES_PER_THREAD = 4
MIN_ELEMENTS_PER_SHARE = 1 << 18

_KERNEL_DTYPES = {  # see [Note: Elements] in intrinsics.py
    torch.float32: torch.float32,
    torch.bfloat16: torch.uint16,
    torch.float16: torch.int16,
    torch.uint8: torch.uint8,
}


def encode(
    fmt: BlockFormat,
    source: Tensor,
    out: Tensor,
    order: RowOrder | None = None,
    seed: int | None = None,
    offset: int = 0,
) -> None:
    """out[k] = quantized source[order[k]].

    source [rows, S] fp32, bf16 or fp16; out [rows, row_bytes] uint8.
    """
    rows, numel = source.shape
    _check_block_size(fmt)
    _check_rows("out", out, (rows,), fmt.row_bytes(numel))
    _zero_padding(fmt, out, numel)
    tile_size = max(ENCODE_TILE_SIZE, fmt.block_size)
    _run(
        cpu_kernels.encode_range,
        rows * -(-numel // tile_size),
        tile_size,
        _flat("source", source),
        source.stride(0),
        _row_order(order, rows),
        _flat("out", out),
        out.stride(0),
        numel,
        (fmt.bits, fmt.block_size),
        fmt.rotate,
        _noise(fmt, seed, offset),
        tile_size,
        np.float32(torch.finfo(torch.float32 if fmt.rotate else source.dtype).max),
    )


def decode(fmt: BlockFormat, encoded: Tensor, out: Tensor, order: RowOrder | None = None) -> None:
    """out[order[k]] = values of encoded[k].

    encoded [rows, row_bytes] uint8; out [rows, S] fp32, bf16 or fp16.
    """
    _decode(fmt, encoded.unsqueeze(0), out, order, factor=1.0, accumulate=False)


def decode_sum(
    fmt: BlockFormat, encoded: Tensor, out: Tensor, factor: float = 1.0, accumulate: bool = False
) -> None:
    """out (+)= factor * (encoded[0] + encoded[1] + ...), summed in fp32 in this order.

    encoded [senders, rows, row_bytes] uint8; out [rows, S] fp32, bf16 or fp16 (fp32 to accumulate).
    """
    _decode(fmt, encoded, out, None, factor, accumulate)


def recode(
    fmt: BlockFormat,
    encoded: Tensor,
    into: BlockFormat,
    out: Tensor,
    numel: int,
    factor: float = 1.0,
    seed: int | None = None,
    offset: int = 0,
) -> None:
    """out = encode(into, factor * (encoded[0] + encoded[1] + ...)): dequantize, reduce, quantize.

    encoded [senders, rows, row_bytes] uint8; out [rows, into.row_bytes(numel)] uint8.
    """
    senders, rows, _ = encoded.shape
    _check_block_size(fmt)
    _check_block_size(into)
    _check_rows("encoded", encoded, (max(senders, 1), rows), fmt.row_bytes(numel))
    _check_rows("out", out, (rows,), into.row_bytes(numel))
    _zero_padding(into, out, numel)
    tile_size = max(ENCODE_TILE_SIZE, fmt.block_size, into.block_size)
    _run(
        cpu_kernels.recode_range,
        rows * -(-numel // tile_size),
        tile_size * senders,
        _flat("encoded", encoded),
        senders,
        encoded.stride()[:2],
        (fmt.bits, fmt.block_size),
        _flat("out", out),
        out.stride(0),
        (into.bits, into.block_size),
        fmt.rotate and not into.rotate,
        into.rotate and not fmt.rotate,
        _noise(into, seed, offset),
        numel,
        tile_size,
        np.float32(factor),
    )


def _decode(
    fmt: BlockFormat, encoded: Tensor, out: Tensor, order: RowOrder | None, factor: float, accumulate: bool
) -> None:
    rows, numel = out.shape
    senders = encoded.shape[0]
    _check_block_size(fmt)
    _check_rows("encoded", encoded, (max(senders, 1), rows), fmt.row_bytes(numel))
    tile_size = max(DECODE_TILE_SIZE, fmt.block_size)
    _run(
        cpu_kernels.decode_range,
        rows * -(-numel // tile_size),
        tile_size * senders,
        _flat("encoded", encoded),
        senders,
        encoded.stride()[:2],
        _flat("out", out),
        out.stride(0),
        _row_order(order, rows),
        numel,
        (fmt.bits, fmt.block_size),
        fmt.rotate,
        tile_size,
        np.float32(torch.finfo(out.dtype).max),
        np.float32(factor),
        accumulate,
    )


def _noise(fmt: BlockFormat, seed: int | None, offset: int) -> tuple[np.uint32, int] | None:
    return (np.uint32(seed_key(seed)), offset) if fmt.stochastic else None


def _check_block_size(fmt: BlockFormat) -> None:
    """Both halves of a block are whole lanes; see simd.py."""
    if fmt.block_size % (2 * LANES):
        raise ValueError(f"block_size is {fmt.block_size}; expected a multiple of {2 * LANES}")


def _check_rows(name: str, rows: Tensor, leading: tuple[int, ...], row_bytes: int) -> None:
    if rows.dtype != torch.uint8 or rows.shape[:-1] != leading or rows.shape[-1] < row_bytes:
        expected = f"expected uint8 of shape {(*leading, row_bytes)}"
        raise ValueError(f"{name} is {rows.dtype} of shape {tuple(rows.shape)}; {expected}")


def _zero_padding(fmt: BlockFormat, out: Tensor, numel: int) -> None:
    used_bytes = fmt.payload_bytes(numel) + fmt.blocks(numel) * SCALE_BYTES
    if 0 < used_bytes < out.shape[1]:
        out[:, used_bytes:] = 0


def _flat(name: str, rows: Tensor) -> NDArray[Any]:
    """All memory from the first to the last element, in one dimension."""
    if rows.dtype not in _KERNEL_DTYPES or rows.device.type != "cpu":
        raise ValueError(f"{name} is {rows.dtype} on {rows.device}; expected fp32, bf16 or fp16 on the CPU")
    if rows.shape[-1] > 1 and rows.stride(-1) != 1:
        raise ValueError(f"{name} has strides {rows.stride()}; expected rows without gaps in them")
    last = sum((size - 1) * stride for size, stride in zip(rows.shape, rows.stride(), strict=True))
    flat = rows.detach().as_strided((last + 1 if rows.numel() else 0,), (1,))
    array: NDArray[Any] = flat.view(_KERNEL_DTYPES[rows.dtype]).numpy()
    return array


def _row_order(order: RowOrder | None, rows: int) -> NDArray[np.int64]:
    return _order_array(None if order is None else tuple(order), rows)


@lru_cache(maxsize=256)
def _order_array(order: tuple[int, ...] | None, rows: int) -> NDArray[np.int64]:
    if order is None:
        return np.arange(rows)
    if sorted(order) != list(range(rows)):
        raise ValueError(f"order is {order}; expected a permutation of the {rows} rows")
    return np.array(order, np.int64)


def _run(kernel: Callable[..., None], tiles: int, elements_per_tile: int, *args: object) -> None:
    """kernel(*args, first, last) over all tiles, on as many threads as are worth it."""
    shares = min(
        torch.get_num_threads() * SHARES_PER_THREAD, tiles * elements_per_tile // MIN_ELEMENTS_PER_SHARE
    )
    threads = min(torch.get_num_threads(), shares)
    if threads <= 1:
        kernel(*args, 0, tiles)
        return
    ranges = iter(list(pairwise(tiles * i // shares for i in range(shares + 1))))

    def work() -> None:
        for first, last in ranges:  # all threads take from the same iterator
            kernel(*args, first, last)

    helpers = [_workers(os.getpid()).submit(work) for _ in range(threads - 1)]
    work()
    for helper in helpers:
        if not helper.cancel():  # one that was not even started is not needed any more
            helper.result()


@cache
def _workers(process_id: int) -> ThreadPoolExecutor:
    """The pool of this process: a fork inherits the parent's without its threads."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="zeropp-quant")
