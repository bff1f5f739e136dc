"""Block quantization on NVIDIA and AMD GPUs: the four functions of reference.py, one Triton launch each.

Import this only where triton is installed. Tensors are on one GPU, or on the CPU under TRITON_INTERPRET=1,
which must then be set before the first import of triton.

Launches go to the current stream of the tensors' device. Nothing waits for the device, nothing is allocated
or copied, with one exception: a row order is uploaded the first time it is used, and kept. The first call of
each kind compiles for about a second. Let both happen before capturing a CUDA graph.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..formats import SCALE_BYTES, BlockFormat, RowOrder
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
    _check_numbers("source", source, rows)
    _check_encoded("out", out, (rows, fmt.row_bytes(numel)), source)
    if rows == 0 or numel == 0:
        return
    with _device_of(source):
        encode_kernel[_grid(fmt, rows, numel)](
            source,
            out,
            _on_device(order, rows, source.device),
            numel,
            source.stride(0),
            out.stride(0),
            seed_key(seed) if fmt.stochastic else 0,
            offset,
            bits=fmt.bits,
            block_size=fmt.block_size,
            rotated=fmt.rotate,
            stochastic=fmt.stochastic,
            largest=LARGEST_FP32 if fmt.rotate else torch.finfo(source.dtype).max,
            **LAUNCH,
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
    """out = encode(into, factor * (encoded[0] + encoded[1] + ...)), in one pass.

    encoded [senders, rows, row_bytes] uint8; out [rows, into.row_bytes(numel)] uint8.
    """
    senders, rows = encoded.shape[:2]
    _check_encoded("encoded", encoded, (senders, rows, fmt.row_bytes(numel)), out)
    _check_encoded("out", out, (rows, into.row_bytes(numel)), encoded)
    if rows == 0 or numel == 0:
        return
    with _device_of(out):
        recode_kernel[_grid(into, rows, numel)](
            encoded,
            out,
            numel,
            encoded.stride(0),
            encoded.stride(1),
            out.stride(0),
            factor,
            seed_key(seed) if into.stochastic else 0,
            offset,
            senders=senders,
            bits=fmt.bits,
            block_size=fmt.block_size,
            into_bits=into.bits,
            into_block_size=into.block_size,
            rotation=into.rotate - fmt.rotate,
            stochastic=into.stochastic,
            **LAUNCH,
        )


def _decode(
    fmt: BlockFormat, encoded: Tensor, out: Tensor, order: RowOrder | None, factor: float, accumulate: bool
) -> None:
    rows, numel = out.shape
    senders = encoded.shape[0]
    _check_numbers("out", out, rows)
    _check_encoded("encoded", encoded, (senders, rows, fmt.row_bytes(numel)), out)
    if rows == 0 or numel == 0:
        return
    with _device_of(out):
        decode_kernel[_grid(fmt, rows, numel)](
            encoded,
            out,
            _on_device(order, rows, out.device),
            numel,
            encoded.stride(0),
            encoded.stride(1),
            out.stride(0),
            factor,
            senders=senders,
            bits=fmt.bits,
            block_size=fmt.block_size,
            rotated=fmt.rotate,
            largest=torch.finfo(out.dtype).max if fmt.rotate else LARGEST_FP32,
            accumulate=accumulate,
            **LAUNCH,
        )


def _device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device, which need not be the tensor's. Nothing on the CPU."""
    guard: AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return guard


def _grid(fmt: BlockFormat, rows: int, numel: int) -> tuple[int, int]:
    """Programs for all blocks of a row, and for the zeros after its scales: these count as scales here."""
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows; a launch takes at most {MAX_ROWS}, the limit of a CUDA grid")
    slots = (fmt.row_bytes(numel) - fmt.payload_bytes(numel)) // SCALE_BYTES
    tile_size: int = TILE.value
    return -(-slots * fmt.block_size // tile_size), rows


def _on_device(order: RowOrder | None, rows: int, device: torch.device) -> Tensor | None:
    return None if order is None else _uploaded(tuple(order), rows, device)


@functools.cache  # unbounded: memory given back while another stream still reads it could be overwritten
def _uploaded(order: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """The order as int32 on the device. This waits for the copy, so any stream may read it afterwards."""
    if sorted(order) != list(range(rows)):
        raise ValueError(f"order is {order}; expected a permutation of the {rows} rows")
    return torch.tensor(order, dtype=torch.int32, device=device)


def _check_numbers(name: str, tensor: Tensor, rows: int) -> None:
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not _rows_contiguous(tensor):
        raise ValueError(
            f"{name} is {tensor.dtype} with strides {tensor.stride()}; expected {rows} contiguous rows of "
            "fp32, bf16 or fp16"
        )


def _check_encoded(name: str, tensor: Tensor, shape: tuple[int, ...], other: Tensor) -> None:
    if (
        tensor.dtype != torch.uint8
        or tensor.shape != shape
        or 0 in shape[:-2]
        or not _rows_contiguous(tensor)
    ):
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} with strides {tensor.stride()}; "
            f"expected uint8 of shape {shape} with contiguous rows"
        )
    strides = (stride for size, stride in zip(shape, tensor.stride()[:-1], strict=False) if size > 1)
    if any(start % SCALE_BYTES for start in (tensor.data_ptr(), *strides)):
        raise ValueError(
            f"{name} has rows at odd addresses (strides {tensor.stride()}); expected multiples of "
            f"{SCALE_BYTES} bytes, for the scales"
        )
    if tensor.device != other.device:
        raise ValueError(
            f"{name} is on {tensor.device}, the other tensor on {other.device}; expected one device"
        )


def _rows_contiguous(tensor: Tensor) -> bool:
    return tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
