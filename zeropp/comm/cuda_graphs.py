"""Graphs of a device (CUDA graphs): zeropp's collectives raise while they are captured.

[Note: Graphs]
The replay of a captured step runs no Python. Every decision that zeropp makes in Python would stay as it was
in the capture: whether a node shard is fresh, whether gradients cross nodes, the number of a reduction that
stochastic rounding depends on. Every replay would reuse the node shard of the capture, and train on old
weights. So a gather or reduction raises while its stream is being captured. With `Config.off()`, all calls go
to the backend unchanged and can be captured; the ledger counts the capture, and no replay.

Graphs of pure computation between gathers work. A captured optimizer step works, too, but its replays run no
hooks: call `ZeroPP.invalidate()` after each replay. Otherwise the next gather finds changed weights and
raises `StaleWeightsError`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache  # a lookup costs some microseconds, in every gather
def _device_module(device_type: str) -> Any:
    return torch.get_device_module(device_type)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of the device is being captured into a graph."""
    module = _device_module(device.type)
    ask = getattr(module, "is_current_stream_capturing", None)
    # A device that was never initialized captures nothing, and torch builds without the device would raise.
    return ask is not None and module.is_initialized() and bool(ask())


def refuse_capture(unit: str, device: torch.device) -> None:
    """Raise if the current stream is being captured; see [Note: Graphs]."""
    if is_capturing(device):
        raise RuntimeError(
            f"unit '{unit}' communicates while a graph of {device.type} is being captured; replays would "
            "send and reuse weights as the capture did, whatever has changed since. Keep FSDP2's gathers and "
            "reductions out of graphs: in torchtitan set --training.disable_cuda_graphs; with torch.compile "
            "use a mode without cudagraphs (not 'reduce-overhead'); or use Config.off() for this run"
        )
