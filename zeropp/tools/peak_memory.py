"""How much memory this process took, from a point in time on."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch


class PeakMemory:
    """The most memory that was in use since it was made: bytes allocated on a GPU, or resident bytes (Linux)
    over those at the start."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        self._start_bytes = self.resident_bytes()
        self.restart()

    @staticmethod
    def resident_bytes() -> int:
        """What this process holds in memory now (Linux), without what earlier work left in the allocator."""
        ctypes.CDLL(None).malloc_trim(0)
        return _status_bytes("VmRSS")

    def restart(self) -> None:
        """Forget the peak so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            Path("/proc/self/clear_refs").write_text("5")

    @property
    def bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, _status_bytes("VmHWM") - self._start_bytes)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(kibibytes) * 1024
