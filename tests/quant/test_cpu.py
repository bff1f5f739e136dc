"""What test_conformance.py does not show of the CPU kernels: their cache on disk, and their input checks."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zeropp.quant import BlockFormat, cpu, cpu_blocks, cpu_intrinsics, cpu_kernels

ENCODE = """
import torch
from zeropp.quant import BlockFormat, cpu, cpu_kernels
fmt = BlockFormat(8, 128)
cpu.encode(fmt, torch.randn(2, 300), torch.empty(2, fmt.row_bytes(300), dtype=torch.uint8))
stats = cpu_kernels.encode_range.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    hits_and_misses = [
        subprocess.run(
            [sys.executable, "-c", ENCODE],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=200,
        ).stdout.split()
        for _ in range(2)
    ]
    assert hits_and_misses == [["0", "1"], ["1", "0"]]


def test_a_change_to_what_is_inlined_changes_the_file_that_numba_looks_at() -> None:
    """See [Note: Cache] in cpu_kernels.py. Write the new sum there, and the kernels are compiled again."""
    inlined = b"".join(Path(str(module.__file__)).read_bytes() for module in (cpu_blocks, cpu_intrinsics))
    assert hashlib.sha256(inlined).hexdigest() == cpu_kernels.INLINED_SHA256


def test_what_it_would_do_wrong_is_refused() -> None:
    fmt = BlockFormat(8, 128)
    source, out = torch.zeros(2, 128), torch.zeros(2, fmt.row_bytes(128), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        cpu.encode(fmt, source.double(), out)
    with pytest.raises(ValueError, match="uint8 of shape"):
        cpu.encode(fmt, source, out[:, :100])
    with pytest.raises(ValueError, match="permutation of the 2 rows"):
        cpu.encode(fmt, source, out, [0, 0])
    with pytest.raises(ValueError, match="expected rows without gaps"):
        cpu.encode(fmt, torch.zeros(128, 2).T, out)
