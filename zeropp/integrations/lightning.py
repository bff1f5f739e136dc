"""Lightning: a callback for `Trainer`, and a function for Fabric. Both need `ModelParallelStrategy`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import Config, ZeroPP, apply

logger = logging.getLogger("zeropp")

Parallelize = Callable[[Any, DeviceMesh], Any]


class ZeroppCallback(Callback):
    """zeropp on a LightningModule that its `configure_model` has sharded with FSDP2.

        strategy = ModelParallelStrategy(data_parallel_size=16, tensor_parallel_size=1)
        Trainer(strategy=strategy, callbacks=[ZeroppCallback(zeropp.Config())], ...)

    With `accumulate_grad_batches`, gradients accumulate inside the node; Lightning itself would send those of
    every micro-batch.
    """

    def __init__(
        self,
        config: Config | Literal["auto"] | None = None,
        *,
        overrides: Mapping[str, Config] | None = None,
    ) -> None:
        self.zpp: ZeroPP | None = None
        """zeropp on the model, once it is set up."""
        self._config, self._overrides = config, overrides

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.zpp = apply(pl_module, self._config, overrides=self._overrides)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.zpp is not None:
            is_full = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
            self.zpp.set_requires_cross_node_sync(is_full or trainer.is_last_batch)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self.zpp is not None and self.zpp.has_history:
            logger.warning(
                "zeropp: Lightning's checkpoint has no place for what every rank keeps, so a resumed run "
                "sends its weights anew, kept errors start at zero, and 'auto' searches again; save "
                "zpp.state_dict() on every rank beside it"
            )


def parallelize(
    function: Parallelize,
    config: Config | Literal["auto"] | None = None,
    *,
    overrides: Mapping[str, Config] | None = None,
) -> Parallelize:
    """`function`, and then zeropp: for Fabric's `ModelParallelStrategy(parallelize_fn=...)`.

        strategy = ModelParallelStrategy(parallelize_fn=parallelize(shard, zeropp.Config()))

    `fabric.no_backward_sync` then accumulates inside the node.
    """

    def both(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        model = function(model, mesh)
        apply(model, config, overrides=overrides).follow_no_sync()
        return model

    return both
