"""Checks of every codec on this device: equality with quant/reference.py bit for bit, and speed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import get_args

import torch
from torch import Tensor

from ...config import INTEGERS, CodecName
from ...quant import BlockFormat, Segment, make_codec, reference
from ...quant.dispatch import Implementation, implementation_for
from .check import Check, CheckResult, Session
from .timer import LONG_ROUND, Timer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (3, 127), (2, 1021), (5, 4097))
"""Rows and elements per row. The odd sizes exercise the tails of kernels."""
GAP = 3
"""Elements before the first row and after each row. Most rows begin at unaligned addresses."""
SENDERS, FACTOR = 3, 1 / 3
STRETCH = 61
"""Consecutive elements of one kind in `awkward` rows."""
SEED, OFFSET = 5, 4096
"""Seed and offset of the noise in stochastic rounding."""
SPEED_ROWS, SPEED_NUMEL = 4, 1 << 18
SLOW = 15.0
"""Ratio of a codec's time to that of a copy of its bytes, above which the result is a warning."""
BIT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def checks() -> Iterator[Check]:
    alone = partial(Check, "kernels", communicates=False, needs_ranks=False)
    for bits in (8, 4):
        does = "encode, decode, decode_sum and recode, also rotated and stochastic, compared with plain torch"
        yield alone(f"int{bits}", does, partial(_same_bits, bits))
    yield alone("NaN and Inf", "each value through every codec, in every dtype", _not_finite)
    does = "encode and decode of 1M elements, timed against a copy that touches as many bytes"
    yield Check("kernels", "speed of codecs", does, _speed, needs_ranks=False)


def _same_bits(bits: int, session: Session) -> CheckResult:
    implementation = implementation_for(torch.empty(0, device=session.world.device))
    compared = 0
    for rotate, stochastic in product((False, True), repeat=2):
        for dtype, block_size in _dtypes_and_block_sizes(rotate):
            fmt = BlockFormat(bits, block_size, rotate, stochastic)
            for rows, numel in SHAPES:
                case = _Case(implementation, fmt, dtype, rows, numel, session.world.device)
                for wrong in (case.encode(), *case.decode(), *case.recode()):
                    compared += 1
                    if wrong is not None:
                        return CheckResult(
                            "fault", wrong, "report it with this table; Config.off() is not affected"
                        )
    name = "plain torch" if implementation is reference else "the kernels"
    return CheckResult("ok", f"{compared} results of {name} are equal bit for bit")


def _dtypes_and_block_sizes(rotate: bool) -> list[tuple[torch.dtype, int]]:
    """Return all dtypes with the default block size, and fp32 with the smallest and the largest."""
    return [*((dtype, 128) for dtype in DTYPES), (torch.float32, 64 if rotate else 32), (torch.float32, 4096)]


class _Case:
    """One format, dtype and shape, which the device and the reference compute."""

    def __init__(
        self,
        implementation: Implementation,
        fmt: BlockFormat,
        dtype: torch.dtype,
        rows: int,
        numel: int,
        device: torch.device,
    ) -> None:
        self._do, self._fmt, self._dtype, self._device = implementation, fmt, dtype, device
        self._rows, self._numel = rows, numel
        self._order = list(reversed(range(rows)))
        self._source = _view(rows, numel, dtype, torch.device("cpu"))[1].copy_(awkward(rows, numel, dtype))

    def encode(self) -> str | None:
        width = self._fmt.row_bytes(self._numel)
        (expected, into), (seen, out) = self._outs(width, torch.uint8)
        reference.encode(self._fmt, self._source, into, self._order, SEED, OFFSET)
        self._do.encode(self._fmt, _to(self._source, self._device), out, self._order, SEED, OFFSET)
        return self._compare("encode", expected, seen, width)

    def decode(self) -> Iterator[str | None]:
        encoded = self._encoded()
        there = _to(encoded, self._device)
        (expected, into), (seen, out) = self._outs(self._numel, self._dtype)
        reference.decode(self._fmt, encoded[0], into, self._order)
        self._do.decode(self._fmt, there[0], out, self._order)
        yield self._compare("decode", expected, seen, self._numel)
        for accumulate in (False, True) if self._dtype == torch.float32 else (False,):
            (expected, into), (seen, out) = self._outs(self._numel, self._dtype)
            reference.decode_sum(self._fmt, encoded, into, FACTOR, accumulate)
            self._do.decode_sum(self._fmt, there, out, FACTOR, accumulate)
            yield self._compare("decode_sum", expected, seen, self._numel)

    def recode(self) -> Iterator[str | None]:
        encoded = self._encoded()
        for bits in (8, 4):
            into_fmt = BlockFormat(bits, self._fmt.block_size, self._fmt.rotate, self._fmt.stochastic)
            width = into_fmt.row_bytes(self._numel)
            (expected, into), (seen, out) = self._outs(width, torch.uint8)
            given = (into_fmt, into, self._numel, FACTOR, SEED, OFFSET)
            reference.recode(self._fmt, encoded, *given)
            self._do.recode(self._fmt, _to(encoded, self._device), into_fmt, out, *given[2:])
            yield self._compare(f"recode to int{bits}", expected, seen, width)

    def _encoded(self) -> Tensor:
        """Return encoded rows of several senders, [SENDERS, rows, row_bytes]."""
        width = self._fmt.row_bytes(self._numel)
        encoded = torch.zeros(SENDERS, self._rows, width, dtype=torch.uint8)
        for sender, rows in enumerate(encoded):
            reference.encode(self._fmt, self._source.roll(sender, 1), rows, None, SEED, OFFSET)
        return encoded

    def _outs(self, width: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Return an output buffer and its rows, for the reference and for the device."""
        return [_view(self._rows, width, dtype, device) for device in (torch.device("cpu"), self._device)]

    def _compare(self, operation: str, expected: Tensor, seen: Tensor, width: int) -> str | None:
        """Describe the first difference of two buffers, gaps included, or return None."""
        seen = seen.cpu()
        different = (_bits(seen) != _bits(expected)).nonzero().flatten()
        if len(different) == 0:
            return None
        at, gap = int(different[0]), _gap(seen.dtype)
        row, column = divmod(at - gap, width + gap)
        unit = "byte" if seen.dtype == torch.uint8 else "element"
        where = f"{unit} {column} of row {row}"
        if not 0 <= column < width:
            where = f"{unit} {at} of the buffer, outside the rows,"
        name = _name(f"int{self._fmt.bits}", self._dtype, self._fmt.rotate, self._fmt.stochastic)
        return (
            f"{operation} of {name}, {self._rows} rows of {self._numel} in blocks of {self._fmt.block_size}: "
            f"{where} is {seen[at].item()}, expected {expected[at].item()} ({len(different)} of "
            f"{seen.numel()} differ)"
        )


def _name(codec: str, dtype: torch.dtype, rotate: bool, stochastic: bool) -> str:
    options = (", rotated" if rotate else "") + (", stochastic" if stochastic else "")
    return f"{codec} ({str(dtype).removeprefix('torch.')}{options})"


def awkward(rows: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return rows with stretches of difficult values: small, large, largest finite, subnormal, zero, ties,
    NaN and Inf."""
    values = torch.randn(rows, numel, generator=torch.Generator().manual_seed(numel))
    finfo = torch.finfo(dtype)
    scales = [1.0, finfo.max, finfo.smallest_normal, 1e-3, finfo.smallest_normal * 2**-6, 0.0, 1e3]
    kinds = len(scales) + 4
    for row in range(rows):
        for start in range(0, numel, STRETCH):
            piece, kind = values[row, start : start + STRETCH], (start // STRETCH + 3 * row) % kinds
            if kind < len(scales):
                piece.mul_(scales[kind]).clamp_(-finfo.max, finfo.max)
            elif kind == len(scales):
                piece.copy_(piece.sign())  # ties between +m and -m
            else:
                piece[-1] = (torch.nan, torch.inf, -torch.inf)[kind - len(scales) - 1]
    return values.to(dtype)


def _view(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a buffer, and rows in it with gaps around them."""
    gap = _gap(dtype)
    buffer = torch.full((gap + rows * (width + gap),), 3, dtype=dtype, device=device)
    return buffer, buffer.as_strided((rows, width), (width + gap, 1), gap)


def _gap(dtype: torch.dtype) -> int:
    return GAP * (2 if dtype == torch.uint8 else 1)  # encoded rows contain 2-byte scales


def _to(source: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, with the same gaps between rows."""
    there = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=device)
    return there.copy_(source)


def _bits(values: Tensor) -> Tensor:
    """Return the values as integers, with one payload for all NaNs."""
    if values.is_floating_point():
        values = torch.where(values.isnan(), torch.nan, values)
    return values.view(BIT_TYPES[values.itemsize])


def _not_finite(session: Session) -> CheckResult:
    block, device = 128, session.world.device
    tried = 0
    for name, dtype, value in product(
        get_args(CodecName), DTYPES, (float("nan"), float("inf"), float("-inf"))
    ):
        for rotate, stochastic in product((False, True), repeat=2) if name in INTEGERS else [(False, False)]:
            row = [Segment(3 * block, block, is_rotated=True)]
            codec = make_codec(name, dtype, row, rotate, stochastic)
            source = torch.ones(1, 3 * block, dtype=dtype, device=device)
            source[0, block + 7] = value
            encoded = torch.empty(1, codec.row_bytes, dtype=torch.uint8, device=device)
            decoded = torch.empty_like(source)
            codec.encode(source, encoded, seed=SEED)
            codec.decode(encoded, decoded)
            finite = decoded.isfinite()[0].cpu()
            tried += 1
            if finite[block + 7]:
                return CheckResult(
                    "fault",
                    f"{_name(name, dtype, rotate, stochastic)}: {value} at element {block + 7} decodes to "
                    f"{decoded[0, block + 7].item()}",
                    "loss scaling would miss overflows: use Config.off(), and report it",
                )
            if not (finite[:block].all() and finite[2 * block :].all()):
                saw = f"{_name(name, dtype, rotate, stochastic)}: {value} spreads to other blocks"
                return CheckResult("fault", saw, "use Config.off(), and report it")
    return CheckResult("ok", f"{tried} values decode at their element, and in no other block")


def _speed(session: Session) -> CheckResult:
    timer = Timer(session.world.device, repeats=5)
    dtype = torch.float32 if session.world.device.type == "cpu" else torch.bfloat16
    source = torch.randn(SPEED_ROWS, SPEED_NUMEL, device=session.world.device).to(dtype)
    out = torch.empty_like(source)
    ratios, slowest = [], 0.0
    for name in get_args(CodecName):
        codec = make_codec(name, dtype, [Segment(SPEED_NUMEL, 128, is_rotated=True)], rotate=True)
        encoded = torch.empty(SPEED_ROWS, codec.row_bytes, dtype=torch.uint8, device=session.world.device)
        touched = torch.empty((source.nbytes + encoded.nbytes) // 2, dtype=torch.uint8, device=source.device)
        elsewhere = torch.empty_like(touched)
        copy = timer.seconds(partial(elsewhere.copy_, touched), LONG_ROUND)
        encode = timer.seconds(partial(codec.encode, source, encoded), LONG_ROUND) / copy
        decode = timer.seconds(partial(codec.decode, encoded, out), LONG_ROUND) / copy
        ratios.append(f"{name} {encode:.1f} and {decode:.1f}")
        slowest = max(slowest, encode, decode)
    saw = f"time of encode and decode / copy: {', '.join(ratios)} ({str(dtype).removeprefix('torch.')})"
    if slowest > SLOW:
        return CheckResult(
            "warning", saw, "codecs are far slower than memory: are the fast kernels installed?"
        )
    return CheckResult("ok", saw)
