"""Files of zeropp's state in a framework's checkpoint: one per rank, if the Config has state."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from .. import ZeroPP


def save_state(zpp: ZeroPP, folder: str | Path) -> None:
    """Write this rank's file into the folder of a checkpoint. Call it on every rank."""
    if zpp.has_history:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(zpp.state_dict(), _file(folder))


def load_state(zpp: ZeroPP, folder: str | Path) -> None:
    """Load this rank's file, if there is one. Call it on every rank, after the weights are loaded. If a rank
    has no file, no rank loads its state."""
    if zpp.has_history:
        file = _file(folder)
        zpp.load_state_dict(torch.load(file, "cpu", weights_only=True) if file.is_file() else None)


def _file(folder: str | Path) -> Path:
    return Path(folder) / f"zeropp-rank{dist.get_rank()}.pt"
