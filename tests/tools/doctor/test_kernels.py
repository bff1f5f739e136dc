from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.ranks import Ranks
from tests.tools.doctor.check_job import run
from zeropp.quant.cpu import launch as cpu
from zeropp.quant.formats import BlockFormat
from zeropp.tools.doctor import kernels
from zeropp.tools.doctor.check import Check, DoctorSettings


def checks(settings: DoctorSettings) -> Iterator[Check]:
    return kernels.checks()


def test_one_rank_finds_no_fault_on_this_machine(ranks: Ranks) -> None:
    (found,) = run(ranks, checks, node_size=None, world=1)
    assert {name: found[name].state for name in ("int8", "int4", "NaN and Inf")} == {
        "int8": "ok", "int4": "ok", "NaN and Inf": "ok"
    }  # fmt: skip
    assert "448 results of the kernels" in found["int4"].saw
    assert "int8" in found["speed of codecs"].saw


def one_wrong_element() -> AbstractContextManager[object]:
    """A kernel that writes 7 into one byte of long, rotated rows."""
    right = cpu.encode

    def wrong(fmt: BlockFormat, source: Tensor, out: Tensor, *rest: Any) -> None:
        right(fmt, source, out, *rest)
        if source.shape == (5, 4097) and fmt.rotate:
            out[3, 1000] = 7

    return patch.object(cpu, "encode", wrong)


def test_a_kernel_that_is_wrong_in_one_element_is_named(ranks: Ranks) -> None:
    found, _ = run(ranks, checks, one_wrong_element, (1,), 1, ("int4",), world=2)
    assert found["int4"].state == "fault"
    message = (
        "rank 1: encode of int4 (float32, rotated), 5 rows of 4097 in blocks of 128: byte 1000 of row 3 is 7"
    )
    assert f"{message}, expected " in found["int4"].saw
    assert "(1 of " in found["int4"].saw


def writes_too_far() -> AbstractContextManager[object]:
    """A kernel that writes one element past its last row."""
    right = cpu.decode

    def wrong(fmt: BlockFormat, encoded: Tensor, out: Tensor, order: Any = None) -> None:
        right(fmt, encoded, out, order)
        behind = out.storage_offset() + len(out) * out.stride(0) - 1
        out.as_strided((1,), (1,), behind).fill_(5)

    return patch.object(cpu, "decode", wrong)


def test_a_kernel_that_writes_outside_of_its_rows_is_named(ranks: Ranks) -> None:
    (found,) = run(ranks, checks, writes_too_far, (0,), None, ("int8",), world=1)
    assert "decode of int8 (float32)" in found["int8"].saw
    assert "outside the rows, is 5.0, expected 3.0" in found["int8"].saw


def swallows_nan() -> AbstractContextManager[object]:
    right = cpu.encode

    def wrong(fmt: BlockFormat, source: Tensor, *rest: Any) -> None:
        right(fmt, source.nan_to_num(0.0, 0.0, 0.0), *rest)

    return patch.object(cpu, "encode", wrong)


def test_a_codec_that_swallows_nan_is_named(ranks: Ranks) -> None:
    (found,) = run(ranks, checks, swallows_nan, (0,), None, ("NaN and Inf",), world=1)
    assert found["NaN and Inf"].state == "fault"
    assert "int8 (float32): nan at element 135 decodes to 0.0" in found["NaN and Inf"].saw


def test_awkward_rows_have_all_kinds_of_values() -> None:
    for dtype in kernels.DTYPES:
        values = kernels.awkward(5, 4097, dtype)
        tiny = torch.finfo(dtype).smallest_normal
        assert values.isnan().any()
        assert values.isinf().any()
        assert ((values.abs() < tiny) & (values != 0)).any()
        assert (values == torch.finfo(dtype).max).any()
        assert (values == 0).any()
