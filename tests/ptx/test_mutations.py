"""The check can fail: one change in the PTX of a right kernel, and a case differs, or an access is refused.

A mutation changes one place of the text. It is run with three cases of other values and sizes, because a
change of the last block or of subnormals does not show in every case. docs/ptx.md lists what is not found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's own interpreter compiles nothing", allow_module_level=True)

from zeropp.quant.formats import BlockFormat

from .cases import Case, make_case, run_case
from .driver import ptx_devices
from .errors import PtxError, RaceError, UnknownInstructionError

PLAIN = replace(
    make_case(0, "sm_80"),
    fmt=BlockFormat(4, 128), into=BlockFormat(4, 128), dtype=torch.float16, rows=2, gaps=(16, 16),
    order=None, senders=3, factor=0.5, accumulate=False,
)  # fmt: skip
ENCODE = replace(PLAIN, operation="encode", fmt=BlockFormat(8, 128), into=BlockFormat(8, 128))
ROTATED = replace(
    PLAIN,
    operation="encode",
    dtype=torch.float32,
    fmt=BlockFormat(8, 128, rotate=True),
    into=BlockFormat(8, 128, rotate=True),
)
DECODE = replace(PLAIN, operation="decode")
TO_BF16 = replace(DECODE, dtype=torch.bfloat16)
SUM = replace(PLAIN, operation="decode_sum", dtype=torch.float32, source_dtype=torch.float32)
RECODE = replace(PLAIN, operation="recode", fmt=BlockFormat(8, 128))
NOISE = BlockFormat(8, 128, stochastic=True)
STOCHASTIC = replace(ENCODE, fmt=NOISE, into=NOISE)

# A case, what is looked for in its PTX, and what takes its place, once.
MUTATIONS = {
    "the constant that rounds": (ENCODE, r"0f4B400000", "0f4B400001"),
    "the constant that a code is cut at": (ENCODE, r"(min\.u32 .*), (%r\d+);", r"\1, 1262485630;"),
    "the mask of an int4 code": (DECODE, r"(and\.b32 .*), 15;", r"\1, 7;"),
    "the mask of the upper int4 code": (DECODE, r"(and\.b32 .*), 240;", r"\1, 112;"),
    "the offset of int8 codes": (RECODE, r"0fCB000080", "0fCB000081"),
    "1/127": (ENCODE, r"0f3C010204", "0f3C014204"),
    "the distance of a shuffle": (ENCODE, r"(shfl\.sync\.bfly\.b32 .*), 2, 31", r"\1, 4, 31"),
    "a shuffle left out": (ENCODE, r"shfl\.sync\.bfly\.b32 (.*), 1, 31, -1;", r"mov.b32 \1;"),
    "the distance of a rotation's stage": (ROTATED, r"(shfl\.sync\.bfly\.b32 .*), 16, 31", r"\1, 8, 31"),
    "the rounding mode of bf16": (TO_BF16, r"cvt\.rn\.bf16x2", "cvt.rz.bf16x2"),
    "subnormals flushed": (SUM, r"(?s)(.*)mul\.rn\.f32", r"\1mul.rn.ftz.f32"),  # the last one, by the factor
    "a multiplication fused": (RECODE, r"add\.rn\.f32", "fma.rn.f32"),
    "an approximate division": (ENCODE, r"div\.rn\.f32", "div.full.f32"),
    "the order of a difference": (ROTATED, r"(sub\.rn\.f32 .*), (%r\d+), (%r\d+)", r"\1, \3, \2"),
    "a NaN lost": (ENCODE, r"(setp\.lt\.u32 .*), 2139095040", r"\1, 2147483647"),
    "a comparison that includes its limit": (ENCODE, r"setp\.lt\.s32(.*%r\d+;)", r"setp.le.s32\1"),
    "a store without its mask": (DECODE, r"@%p\d+ (st\.global\.v4)", r"\1"),
    "a load without its mask": (ENCODE, r"@%p\d+ (ld\.global\.v4)", r"\1"),
    "the address of a load": (DECODE, r"(ld\.global\.v4.*) \+ 0 \]", r"\1 + 16 ]"),
    "the order of packed bytes": (ENCODE, r"(prmt\.b32 .*), 0x3340U", r"\1, 0x3304U"),
    "the multiplier of the noise": (STOCHASTIC, r"2146121005", "2146121007"),
    "the sign of the noise": (STOCHASTIC, r"shr\.s32", "shr.u32"),
    "the shift of a scale": (RECODE, r"(shl\.b32 .*), 16;", r"\1, 15;"),
}  # fmt: skip

UNKNOWN = ("a multiplication fused", "an approximate division")
"""Found because the interpreter has no such instruction."""


def cases_like(case: Case) -> Iterator[Case]:
    """Cases of one kernel: their sizes are multiples of 16, as its specialization says."""
    for values, numel in ((1, 4400), (2, 128), (5, 9008)):
        yield replace(case, values=values, numel=numel)


def is_found(case: Case, change: Callable[[str], str]) -> Exception | None:
    """The error of the first case that fails with this change of the PTX."""
    with ptx_devices(case.target, change=change) as driver:
        for each in cases_like(case):
            try:
                run_case(each, driver)
            except (AssertionError, PtxError) as error:
                return error
    return None


@cache
def ptx_of(case: Case) -> str:
    """The PTX, of a kernel that is right."""
    with ptx_devices(case.target) as driver:
        for each in cases_like(case):
            run_case(each, driver)
        assert len({run.kernel for run in driver.runs}) == 1
        return driver.runs[0].ptx


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_found(name: str) -> None:
    case, pattern, replacement = MUTATIONS[name]
    text = ptx_of(case)
    mutated = re.sub(pattern, replacement, text, count=1)
    assert mutated != text, "there is nothing to change: did the compiler change?"
    error = is_found(case, lambda _: mutated)
    assert error is not None
    assert isinstance(error, UnknownInstructionError) == (name in UNKNOWN)


@pytest.mark.parametrize("case", [ENCODE, ROTATED, DECODE], ids=["encode", "encode rotated", "decode"])
def test_every_barrier_is_needed(case: Case) -> None:
    """Dropped one by one, each barrier leaves a race."""
    text = ptx_of(case)
    places = [match.span() for match in re.finditer(r"bar\.sync\s+0;", text)]
    assert places
    for start, end in places:
        error = is_found(case, lambda _, start=start, end=end: text[:start] + text[end:])  # type: ignore[misc]
        assert isinstance(error, RaceError), f"barrier at {start}"
