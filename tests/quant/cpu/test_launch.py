"""The CPU kernels' cache on disk and input checks. Their results are tested in test_conformance.py."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]

from zeropp.quant import BlockFormat
from zeropp.quant.cpu import kernels, simd
from zeropp.quant.cpu import launch as cpu

ENCODE_IN_THREE = """
import os
import torch
from zeropp.quant import BlockFormat
from zeropp.quant.cpu import kernels, launch as cpu
fmt = BlockFormat(8, 128)
for _ in range(3):
    if os.fork() == 0:
        cpu.encode(fmt, torch.randn(2, 300), torch.empty(2, fmt.row_bytes(300), dtype=torch.uint8))
        stats = kernels.encode_range.stats
        os.write(1, f"{sum(stats.cache_hits.values())} {sum(stats.cache_misses.values())}\\n".encode())
        os._exit(0)
for _ in range(3):
    os.wait()
"""

CONFORMANCE = str(Path(__file__).parents[1] / "test_conformance.py")


def test_of_several_processes_at_once_one_compiles(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", ENCODE_IN_THREE],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},  # no threads to fork
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    hits_and_misses = sorted(run.stdout.splitlines())
    assert hits_and_misses == ["0 1", "1 0", "1 0"]


def test_a_change_of_simd_changes_the_file_that_numba_checks() -> None:
    """See [Note: Cache] in kernels.py. Writing the new sum there makes numba compile the kernels again."""
    assert hashlib.sha256(Path(str(simd.__file__)).read_bytes()).hexdigest() == kernels.INLINED_SHA256


@pytest.mark.skipif(not get_host_cpu_features().get("avx2"), reason="this CPU has no AVX2")
def test_kernels_for_a_cpu_without_avx512_equal_the_reference_too() -> None:
    """Only two kernels, because most of the time is compilation, once per machine."""
    tests = "(test_encode and 4-stochastic or test_decode_sum and 4-) and dtype1 and not rotated"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", CONFORMANCE, "-k", tests],
        env={**os.environ, "NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "+ssse3,+avx2"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout
    assert "2 passed" in run.stdout


def test_invalid_arguments_are_refused() -> None:
    fmt = BlockFormat(8, 128)
    source, out = torch.zeros(2, 128), torch.zeros(2, fmt.row_bytes(128), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        cpu.encode(fmt, source.double(), out)
    with pytest.raises(ValueError, match="uint8 of shape"):
        cpu.encode(fmt, source, out[:, :100])
    with pytest.raises(ValueError, match="permutation of the 2 rows"):
        cpu.encode(fmt, source, out, [0, 0])
    with pytest.raises(ValueError, match="expected contiguous rows"):
        cpu.encode(fmt, torch.zeros(128, 2).T, out)
    uneven = BlockFormat(4, 48)
    with pytest.raises(ValueError, match="block_size is 48; expected a multiple of 32"):
        cpu.encode(uneven, source, torch.zeros(2, uneven.row_bytes(128), dtype=torch.uint8))
