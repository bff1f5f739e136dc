"""Block quantization on NVIDIA and AMD GPUs: the four functions of reference.py, for fp32, bf16 and fp16, one
Triton launch each.

Import this only where triton is installed. Tensors are on one GPU, or on the CPU under TRITON_INTERPRET=1,
which must then be set before the first import of triton.

Launches go to the current stream of the tensors' device. Nothing waits for the device, and nothing is
allocated or copied, with one exception: a row order is uploaded at its first use, and stored. The first call
of each kind compiles for about a second. Let both happen before capturing a CUDA graph.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..checks import check_decode_sum, check_encode, check_order, check_recode, decode_by
from ..formats import SCALE_BYTES, BlockFormat, RowOrder, Seed
from ..noise import seed_key
from ..rotation import LARGEST_FP32
from .bits import TILE
from .kernels import decode_kernel, encode_kernel, recode_kernel

THREADS = 128  # of a program; see [Note: Tile size] in kernels.py
NVIDIA_WARP, AMD_WARP = 32, 64
MAX_ROWS = 65_535
LAUNCH = {
    "num_warps": THREADS // (AMD_WARP if torch.version.hip else NVIDIA_WARP),
    "enable_fp_fusion": False,  # see [Note: Bit parity] in kernels.py
}


def encode(
    fmt: BlockFormat, source: Tensor, out: Tensor, order: RowOrder = None, seed: Seed = None, offset: int = 0
) -> None:
    rows, numel = check_encode(fmt, source, out)
    key = seed_key(seed) if fmt.stochastic else 0
    _launch(
        encode_kernel,
        (source, out, _on_device(order, out), numel, source.stride(0), out.stride(0), key, offset),
        *(fmt, rows, numel, out),
        bits=fmt.bits,
        block_size=fmt.block_size,
        rotated=fmt.rotate,
        stochastic=fmt.stochastic,
        largest=LARGEST_FP32 if fmt.rotate else torch.finfo(source.dtype).max,
    )


def decode_sum(
    fmt: BlockFormat, encoded: Tensor, out: Tensor,
    factor: float = 1.0, accumulate: bool = False, order: RowOrder = None,
) -> None:  # fmt: skip
    senders, rows, numel = check_decode_sum(fmt, encoded, out)
    _launch(
        decode_kernel,
        (encoded, out, _on_device(order, out), numel, *encoded.stride()[:2], out.stride(0), factor),
        *(fmt, rows, numel, out),
        senders=senders,
        bits=fmt.bits,
        block_size=fmt.block_size,
        rotated=fmt.rotate,
        largest=torch.finfo(out.dtype).max if fmt.rotate else LARGEST_FP32,
        accumulate=accumulate,
    )


def recode(
    fmt: BlockFormat, encoded: Tensor, into: BlockFormat, out: Tensor, numel: int,
    factor: float = 1.0, seed: Seed = None, offset: int = 0,
) -> None:  # fmt: skip
    senders, rows = check_recode(fmt, encoded, into, out, numel)
    key = seed_key(seed) if into.stochastic else 0
    _launch(
        recode_kernel,
        (encoded, out, numel, *encoded.stride()[:2], out.stride(0), factor, key, offset),
        *(into, rows, numel, out),
        senders=senders,
        bits=fmt.bits,
        block_size=fmt.block_size,
        into_bits=into.bits,
        into_block_size=into.block_size,
        rotation=into.rotate - fmt.rotate,
        stochastic=into.stochastic,
    )


decode = decode_by(decode_sum)


def _launch(
    kernel: Any,
    given: tuple[object, ...],
    fmt: BlockFormat,
    rows: int,
    numel: int,
    tensor: Tensor,
    **constants: object,
) -> None:
    """Launch programs for all blocks of a row, and for the zeros after its scales, which count as scales."""
    if rows == 0 or numel == 0:
        return
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows; a launch takes at most {MAX_ROWS}, the limit of a CUDA grid")
    slots = (fmt.row_bytes(numel) - fmt.payload_bytes(numel)) // SCALE_BYTES
    # Triton launches on the current device. On the CPU this does nothing.
    with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
        kernel[-(-slots * fmt.block_size // TILE.value), rows](*given, **constants, **LAUNCH)


def _on_device(order: RowOrder, tensor: Tensor) -> Tensor | None:
    return None if order is None else _uploaded(tuple(order), tensor.shape[0], tensor.device)


@functools.cache  # unbounded: memory given back while another stream still reads it could be overwritten
def _uploaded(order: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """The order as int32 on the device. This waits for the copy, so any stream may read it afterwards."""
    check_order(order, rows)
    return torch.tensor(order, dtype=torch.int32, device=device)
