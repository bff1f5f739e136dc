"""Accelerate: `attach` after `prepare`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from torch import nn

from .. import Config, ZeroPP, apply
from .state_files import load_state, save_state


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    config: Config | Literal["auto"] | None = None,
    *,
    overrides: Mapping[str, Config] | None = None,
) -> ZeroPP:
    """Apply zeropp to a model that `accelerator.prepare` has sharded with FSDP2. Call it on every rank.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        zeropp.integrations.accelerate.attach(accelerator, model, zeropp.Config())

    `accumulate()` and `no_sync()` then accumulate inside the node. `save_state` and `load_state` include
    zeropp's state, in one file per rank.
    """
    if not accelerator.is_fsdp2:
        raise ValueError(
            f"the accelerator's distributed_type is {accelerator.distributed_type}, without FSDP2; expected "
            "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))"
        )
    zpp = apply(model, config, overrides=overrides)
    zpp.follow_no_sync()

    def save(models: Any, weights: Any, folder: str) -> None:
        save_state(zpp, folder)

    def load(models: Any, folder: str) -> None:
        load_state(zpp, Path(folder))  # Accelerate calls this hook after it has loaded FSDP2's weights

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return zpp
