"""The GPU kernels on the CPU, in Triton's interpreter, against the reference, bit for bit.

TRITON_INTERPRET=1 must be set before triton is imported, and nothing can be compiled afterwards. So pytest
runs this file a second time, in a separate process with the variable set. Only there it has the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_in_the_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        repository = Path(__file__).parents[2]
        run = subprocess.run(command, env=environment, cwd=repository, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr

else:
    import triton.language as tl  # type: ignore[import-untyped]
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    from tests.quant.test_conformance import (
        BLOCK_SIZES,
        FLOAT_DTYPES,
        Case,
        Implementation,
        assert_same_bits,
        make_encoded,
        make_out,
        make_source,
        test_decode,
        test_decode_sum,
        test_encode,
        test_recode,
    )
    from zeropp.quant import reference
    from zeropp.quant.formats import BlockFormat
    from zeropp.quant.gpu import launch as gpu

    # Imported, the conformance tests run here too, with the `implementation` below.
    __all__ = ["test_decode", "test_decode_sum", "test_encode", "test_recode"]

    # Three rows: fewer, and every order is its own inverse; more are more programs of the same kind.
    GPU = Implementation("gpu", gpu, max_examples=4, max_numel=5000, max_rows=3, option_examples=2)

    @pytest.fixture
    def implementation() -> Implementation:
        return GPU

    @pytest.fixture(autouse=True)
    def quiet_numpy() -> Iterator[None]:
        """The interpreter computes with numpy, which warns of overflows. Here they are intended."""
        with np.errstate(all="ignore"):
            yield

    @cache
    def languages(function: Any) -> tuple[bool, ...]:
        """Which modules of triton's language the function refers to."""
        return tuple(any(value is lang for value in function.__globals__.values()) for lang in (tl, tl.core))

    @pytest.fixture(autouse=True)
    def patches_once(monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace triton's language once for all functions of a kernel that refer to the same modules of it.

        The interpreter does it for every function that the kernel calls, which takes half of the time."""
        patch, call = interpreter._patch_lang, interpreter.GridExecutor.__call__
        patched: set[tuple[bool, ...]] = set()

        def patch_once(function: Any) -> Any:
            seen = languages(function)
            if seen in patched:
                return interpreter._LangPatchScope()
            patched.add(seen)
            return patch(function)

        def run_kernel(*args: Any, **kwargs: Any) -> Any:
            patched.clear()
            return call(*args, **kwargs)

        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_kernel)

    @pytest.fixture(autouse=True)
    def remembers_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
        """Cache dtypes. The interpreter makes a table of all dtypes for each operation, and looks up one."""
        look, found = interpreter._get_np_dtype, {}

        def look_once(dtype: Any) -> Any:
            name = str(dtype.scalar)
            if name not in found:
                found[name] = look(dtype)
            return found[name]

        monkeypatch.setattr(interpreter, "_get_np_dtype", look_once)

    @pytest.mark.parametrize("bits", [8, 4])
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_every_format(bits: int, block_size: int) -> None:
        """Two tiles, the second with a tail; rows that start anywhere; NaN, Inf, huge, tiny and zeros.

        One dtype for each format: kernels compute in fp32, and the dtype changes only a load or a store."""
        fmt = BlockFormat(bits, block_size)
        case = Case(GPU, fmt, rows=2, numel=4099, seed=block_size, gap=3, order=[1, 0])
        dtype = FLOAT_DTYPES[(BLOCK_SIZES.index(block_size) + bits // 4) % 3]
        source = make_source(case, dtype)
        expected, expected_view = make_out(case, torch.uint8, fmt.row_bytes(case.numel))
        actual, actual_view = make_out(case, torch.uint8, fmt.row_bytes(case.numel))
        reference.encode(fmt, source, expected_view, case.order)
        gpu.encode(fmt, source, actual_view, case.order)
        assert_same_bits(actual, expected)

        expected, expected_view = make_out(case, dtype, case.numel)
        actual, actual_view = make_out(case, dtype, case.numel)
        encoded = make_encoded(case, dtype, senders=1)[0]
        reference.decode(fmt, encoded, expected_view, case.order)
        gpu.decode(fmt, encoded, actual_view, case.order)
        assert_same_bits(actual, expected)

    def test_a_scale_is_rounded_toward_zero_rather_than_overflow() -> None:
        """Then the extreme is more than 127 steps (or 8), and is clipped; of either sign."""
        for bits in (8, 4):
            fmt = BlockFormat(bits, 128)
            for dtype in FLOAT_DTYPES:
                source = torch.linspace(-1, 1, 512).mul(torch.finfo(dtype).max).to(dtype).view(2, 256)
                expected = torch.zeros(2, fmt.row_bytes(256), dtype=torch.uint8)
                actual = torch.ones_like(expected)
                reference.encode(fmt, source, expected)
                gpu.encode(fmt, source, actual)
                assert_same_bits(actual, expected)

    def test_invalid_arguments_are_refused() -> None:
        fmt = BlockFormat(8, 128)
        source, out = torch.zeros(2, 128), torch.zeros(2 * 144 + 1, dtype=torch.uint8)
        rows = out[:-1].view(2, 144)
        with pytest.raises(ValueError, match=r"order is \(0, 0\); expected a permutation of the 2 rows"):
            gpu.encode(fmt, source, rows, [0, 0])
        with pytest.raises(ValueError, match=r"source is torch\.float64"):
            gpu.encode(fmt, source.double(), rows)
        with pytest.raises(ValueError, match=r"expected uint8 of shape \(2, 144\)"):
            gpu.encode(fmt, source, rows[:, :128])
        with pytest.raises(ValueError, match="out has rows at odd addresses"):
            gpu.encode(fmt, source, out[1:].view(2, 144))
