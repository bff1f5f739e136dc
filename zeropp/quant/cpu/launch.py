"""Block quantization on the CPU, at memory speed: reference.py bit for bit, in one pass and without copies.

The four functions of reference.py, for fp32, bf16 and fp16. kernels.py does the work. This file shares the
tiles between threads, as many as torch uses. Each calls the same kernel, which releases the GIL. Any number
of Python threads may call these functions at the same time.
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

from ..checks import check_decode_sum, check_encode, check_order, check_recode, decode_by
from ..formats import SCALE_BYTES, BlockFormat, RowOrder, Seed
from ..noise import seed_key
from . import kernels
from .simd import LANES

# Elements that a kernel works on at once, at least: enough blocks to hide the latency of their scales, ...
ENCODE_TILE_SIZE = 2048
# ... and few if there are no scales to find, so that reads and writes of memory alternate.
DECODE_TILE_SIZE = 256
# Several shares for each thread, because cores are not equally fast, but none too small to hand out.
SHARES_PER_THREAD = 4
MIN_ELEMENTS_PER_SHARE = 1 << 18

_KERNEL_DTYPES = {  # see [Note: Elements] in simd.py
    torch.float32: torch.float32,
    torch.bfloat16: torch.uint16,
    torch.float16: torch.int16,
    torch.uint8: torch.uint8,
}


def encode(
    fmt: BlockFormat, source: Tensor, out: Tensor, order: RowOrder = None, seed: Seed = None, offset: int = 0
) -> None:
    rows, numel = check_encode(fmt, source, out)
    _zero_padding(fmt, out, numel)
    limit = torch.finfo(torch.float32 if fmt.rotate else source.dtype).max
    given = _rows(source, order), _rows(out), _format(fmt), _noise(fmt, seed, offset), np.float32(limit)
    _run(kernels.encode_range, given, rows, 1, numel, max(ENCODE_TILE_SIZE, fmt.block_size))


def decode_sum(
    fmt: BlockFormat, encoded: Tensor, out: Tensor,
    factor: float = 1.0, accumulate: bool = False, order: RowOrder = None,
) -> None:  # fmt: skip
    senders, rows, numel = check_decode_sum(fmt, encoded, out)
    given = (
        *(_rows(encoded), (senders, encoded.stride(0)), _rows(out, order), _format(fmt)),
        *(np.float32(torch.finfo(out.dtype).max), np.float32(factor), accumulate),
    )
    _run(kernels.decode_range, given, rows, senders, numel, max(DECODE_TILE_SIZE, fmt.block_size))


def recode(
    fmt: BlockFormat, encoded: Tensor, into: BlockFormat, out: Tensor, numel: int,
    factor: float = 1.0, seed: Seed = None, offset: int = 0,
) -> None:  # fmt: skip
    senders, rows = check_recode(fmt, encoded, into, out, numel)
    _zero_padding(into, out, numel)
    given = (
        *(_rows(encoded), (senders, encoded.stride(0)), _format(fmt)),
        *(_rows(out), _format(into), _noise(into, seed, offset), np.float32(factor)),
    )
    tile_size = max(ENCODE_TILE_SIZE, fmt.block_size, into.block_size)
    _run(kernels.recode_range, given, rows, senders, numel, tile_size)


decode = decode_by(decode_sum)


def _format(fmt: BlockFormat) -> kernels.Format:
    if fmt.block_size % (2 * LANES):  # both halves of a block are whole lanes; see simd.py
        raise ValueError(f"block_size is {fmt.block_size}; expected a multiple of {2 * LANES}")
    return fmt.bits, fmt.block_size, fmt.rotate


def _noise(fmt: BlockFormat, seed: Seed, offset: int) -> kernels.Noise | None:
    return (np.uint32(seed_key(seed)), offset) if fmt.stochastic else None


def _zero_padding(fmt: BlockFormat, out: Tensor, numel: int) -> None:
    used_bytes = fmt.payload_bytes(numel) + fmt.blocks(numel) * SCALE_BYTES
    if 0 < used_bytes < out.shape[1]:
        out[:, used_bytes:] = 0


def _rows(rows: Tensor, order: RowOrder = None) -> kernels.Rows:
    """All memory of rows (of the first sender), in one dimension, and where each row starts in it."""
    (count, numel), stride = rows.shape[-2:], rows.stride(-2)
    end = (count - 1) * stride + numel if rows.numel() else 0
    memory = rows.detach().as_strided((end,), (1,)).view(_KERNEL_DTYPES[rows.dtype]).numpy()
    return memory, _row_numbers(None if order is None else tuple(order), count) * stride


@lru_cache(maxsize=256)
def _row_numbers(order: tuple[int, ...] | None, rows: int) -> NDArray[np.int64]:
    if order is None:
        return np.arange(rows)
    check_order(order, rows)
    return np.array(order, np.int64)


def _run(
    kernel: Callable[..., None], given: tuple[Any, ...], rows: int, senders: int, numel: int, tile_size: int
) -> None:
    """Call kernel(*given, ...) for all tiles, on as many threads as are worth it."""
    tiles, threads = rows * -(-numel // tile_size), torch.get_num_threads()
    shares = min(threads * SHARES_PER_THREAD, tiles * tile_size * senders // MIN_ELEMENTS_PER_SHARE)
    threads = min(threads, shares)
    if threads <= 1:
        kernel(*given, (numel, tile_size, 0, tiles))
        return
    ranges = iter(list(pairwise(tiles * i // shares for i in range(shares + 1))))

    def work() -> None:
        for first, last in ranges:  # all threads take from the same iterator
            kernel(*given, (numel, tile_size, first, last))

    helpers = [_workers(os.getpid()).submit(work) for _ in range(threads - 1)]
    work()
    for helper in helpers:
        if not helper.cancel():  # a helper that has not started is not needed any more
            helper.result()


@cache
def _workers(process_id: int) -> ThreadPoolExecutor:
    """The pool of this process: a fork inherits the parent's pool without its threads."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="zeropp-quant")
