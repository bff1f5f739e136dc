from __future__ import annotations

import subprocess
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zeropp.quant import noop, reference
from zeropp.quant.cpu import launch as cpu
from zeropp.quant.dispatch import implementation_for
from zeropp.quant.formats import BlockFormat

WITHOUT_NUMBA = """
import logging, sys
sys.modules["numba"] = None  # as if it were not installed
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
import torch, zeropp
from zeropp.quant import Segment, make_codec, reference
from zeropp.quant.dispatch import implementation_for
x = torch.randn(2, 300)
for _ in range(2):
    assert implementation_for(x) is reference
    codec = make_codec("int8", x.dtype, [Segment(300, 128)])
    encoded = torch.empty(2, codec.row_bytes, dtype=torch.uint8)
    codec.encode(x, encoded)
"""


def test_cpu_tensors_get_the_numba_kernels() -> None:
    assert implementation_for(torch.zeros(3)) is cpu


def test_fake_tensors_of_a_dry_run_have_nothing_to_encode() -> None:
    with FakeTensorMode():
        x, encoded = torch.zeros(2, 3), torch.zeros(2, 1, 16, dtype=torch.uint8)
        implementation = implementation_for(x)
        assert implementation is noop
        int8 = BlockFormat(bits=8, block_size=32)
        implementation.encode(int8, x, encoded[0], [1, 0])
        implementation.decode(int8, encoded[0], x, order=None)
        implementation.decode_sum(int8, encoded, x, 0.5, accumulate=True)
        implementation.recode(int8, encoded, int8, encoded[0], 3, factor=0.5)


class _Subclass(torch.Tensor):
    pass


def test_other_subclasses_get_the_reference() -> None:
    assert implementation_for(torch.zeros(3).as_subclass(_Subclass)) is reference


def test_without_numba_the_reference_works_and_one_warning_says_so() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMBA], capture_output=True, text=True, timeout=600, check=True
    )
    assert run.stdout.count("WARNING") == 1
    assert "numba is not installed" in run.stdout
    assert "about 30 times as slow; install zeropp[cpu]" in run.stdout
