"""Peak memory of this process since a point in time."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch


class PeakMemory:
    """Peak memory since construction: bytes allocated on a GPU, or, on a CPU (Linux), resident bytes minus
    those at construction."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        self._start_bytes = self.resident_bytes()
        self.restart()

    @staticmethod
    def resident_bytes() -> int:
        """Return the resident bytes of this process (Linux), without free memory of the allocator."""
        ctypes.CDLL(None).malloc_trim(0)
        return _status_bytes("VmRSS")

    def restart(self) -> None:
        """Reset the peak to the current memory."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM

    @property
    def bytes(self) -> int:
        """Bytes at the peak."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, _status_bytes("VmHWM") - self._start_bytes)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(kibibytes) * 1024
