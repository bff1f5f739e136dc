"""Random calls of launch.py against reference.py: every number is drawn from a seed, so a case has a name.

A case is one call. Its buffers start anywhere and have gaps between their rows. They are compared whole, bit
by bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from tests.quant.test_conformance import (
    AWKWARD_SIZES,
    BLOCK_SIZES,
    FLOAT_DTYPES,
    IMPLEMENTATIONS,
    assert_same_bits,
    make_encoded,
    make_out,
    make_source,
)
from tests.quant.test_conformance import Case as Buffers
from zeropp.quant import reference
from zeropp.quant.formats import BlockFormat
from zeropp.quant.gpu import launch

from .driver import TARGETS, PtxDriver

OPERATIONS = ("encode", "decode", "decode_sum", "recode")
GAPS = (0, 16, 1, 3)
FACTORS = (1.0, 0.5, 1 / 3, -2.0, 0.0, 1e-30, 1e30)
OFFSETS = (0, 4096, 2**32 - 64, 2**40)
MAX_ROWS, MAX_NUMEL, MAX_SENDERS = 5, 9000, 17


@dataclass(frozen=True)
class Case:
    seed: int
    target: str
    operation: str
    fmt: BlockFormat
    into: BlockFormat
    dtype: torch.dtype
    source_dtype: torch.dtype
    """What was encoded, before decoding."""
    rows: int
    numel: int
    gaps: tuple[int, int]
    """Elements before the first and after each row: of the source and of the result."""
    order: tuple[int, ...] | None
    senders: int
    factor: float
    accumulate: bool
    offset: int
    values: int
    """Seed of the values."""

    def __str__(self) -> str:
        return f"make_case({self.seed}, {self.target!r}): {self!r}"

    @property
    def axes(self) -> Iterator[tuple[str, object]]:
        """What makes the compiled kernel, or its way through the tensors, another one."""
        yield "target", self.target
        yield "format", (self.fmt.bits, self.fmt.rotate)
        yield "block", self.fmt.block_size
        yield "length", "16n" if self.numel % 16 == 0 else "1" if self.numel == 1 else "odd"
        yield "gaps", tuple(gap % 16 == 0 for gap in self.gaps)
        if self.operation in ("encode", "decode"):
            yield "order", self.order is not None
        if self.operation in ("encode", "recode"):
            yield "random", (self.into.stochastic, self.offset > 2**32)
        if self.operation == "recode":
            yield "into", (self.into.bits, self.into.rotate - self.fmt.rotate)
            yield (
                "blocks",
                (self.into.block_size > self.fmt.block_size) - (self.into.block_size < self.fmt.block_size),
            )
        else:
            yield "dtype", self.dtype
        if self.operation in ("decode_sum", "recode"):
            yield "senders", min(self.senders, 5)
        if self.operation == "decode_sum":
            yield "accumulate", self.accumulate


def make_case(seed: int, target: str | None = None) -> Case:
    """Return the case of this seed, for a target or for a drawn one."""
    draw = random.Random(seed)
    operation = draw.choice(OPERATIONS)
    fmt = _draw_format(draw)
    into = _draw_format(draw) if operation == "recode" else fmt
    dtype = draw.choice(FLOAT_DTYPES)
    rows = draw.randint(1, MAX_ROWS)
    accumulate = operation == "decode_sum" and draw.random() < 0.5
    order = draw.sample(range(rows), rows)
    return Case(
        seed=seed,
        target=target or draw.choice(TARGETS),
        operation=operation,
        fmt=fmt,
        into=into,
        dtype=torch.float32 if accumulate else dtype,
        source_dtype=draw.choice(FLOAT_DTYPES),
        rows=rows,
        numel=_draw_numel(draw),
        gaps=(draw.choice(GAPS), draw.choice(GAPS)),
        order=tuple(order) if draw.random() < 0.5 else None,
        senders=draw.randint(1, MAX_SENDERS),
        factor=draw.choice(FACTORS),
        accumulate=accumulate,
        offset=draw.choice(OFFSETS),
        values=draw.randrange(2**16),
    )


def _draw_format(draw: random.Random) -> BlockFormat:
    rotate, stochastic = draw.random() < 0.4, draw.random() < 0.4
    return BlockFormat(
        draw.choice((8, 4)), draw.choice(BLOCK_SIZES[1:] if rotate else BLOCK_SIZES), rotate, stochastic
    )


def _draw_numel(draw: random.Random) -> int:
    sizes = [
        draw.choice(AWKWARD_SIZES[1:]),
        draw.randint(1, MAX_NUMEL),
        16 * draw.randint(1, MAX_NUMEL // 16),
    ]
    return draw.choice(sizes)


def check_case(case: Case) -> None:
    """Call launch.py and reference.py, and compare all bytes of their results."""
    expected, actual = (_call(case, module) for module in (reference, launch))
    assert_same_bits(actual, expected)


def _call(case: Case, module: ModuleType) -> Tensor:
    """The whole buffer of the result."""
    noise = {"seed": case.values, "offset": case.offset}
    source, result = (_buffers(case, gap) for gap in case.gaps)
    encodes = case.operation in ("encode", "recode")
    whole, out = make_out(
        result,
        torch.uint8 if encodes else case.dtype,
        case.into.row_bytes(case.numel) if encodes else case.numel,
    )
    if case.operation == "encode":
        module.encode(case.fmt, make_source(source, case.dtype), out, case.order, **noise)
        return whole
    encoded = make_encoded(source, case.source_dtype, 1 if case.operation == "decode" else case.senders)
    if case.operation == "decode":
        module.decode(case.fmt, encoded[0], out, case.order)
    elif case.operation == "decode_sum":
        module.decode_sum(case.fmt, encoded, out, case.factor, case.accumulate)
    else:
        module.recode(case.fmt, encoded, case.into, out, case.numel, case.factor, **noise)
    return whole


def _buffers(case: Case, gap: int) -> Buffers:
    return Buffers(
        IMPLEMENTATIONS[0], case.fmt, case.rows, case.numel, case.values, gap, None, offset=case.offset
    )


def run_case(case: Case, driver: PtxDriver) -> None:
    """Check a case on the device of its target."""
    driver.current_device = driver.targets.index(case.target)
    check_case(case)


def covering_cases(candidates: Sequence[Case]) -> list[Case]:
    """Cases that have, together, every value of every axis of each operation that the candidates have.

    The next one is always the candidate that adds the most; every operation meets every target."""
    features = {case: {(case.operation, *axis) for axis in case.axes} for case in candidates}
    missing = set().union(*features.values())
    chosen = []
    while missing:
        best = max(features, key=lambda case: len(features[case] & missing))
        missing -= features.pop(best)
        chosen.append(best)
    return chosen


def with_target(case: Case, target: str) -> Case:
    return replace(case, target=target)
