"""Peak memory of this process."""

from __future__ import annotations

import torch

from zeropp.tools.peak_memory import PeakMemory

MIB = 2**20


def test_the_peak_stays_until_it_is_restarted() -> None:
    memory = PeakMemory()
    held = torch.ones(32 * MIB)  # 128 MiB, touched
    assert memory.bytes > 120 * MIB
    del held
    assert memory.bytes > 120 * MIB
    memory.restart()
    assert memory.bytes < 60 * MIB
