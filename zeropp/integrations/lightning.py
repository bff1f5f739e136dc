"""Lightning: a callback for `Trainer` and a function for Fabric. Both need `ModelParallelStrategy`."""

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
    """Applies zeropp to a LightningModule that its `configure_model` has sharded with FSDP2.

        strategy = ModelParallelStrategy(data_parallel_size=16, tensor_parallel_size=1)
        Trainer(strategy=strategy, callbacks=[ZeroppCallback(zeropp.Config())], ...)

    With `accumulate_grad_batches`, gradients accumulate inside the node. Lightning alone sends the gradients
    of every micro-batch across nodes.
    """

    def __init__(
        self,
        config: Config | Literal["auto"] | None = None,
        *,
        overrides: Mapping[str, Config] | None = None,
    ) -> None:
        self.zpp: ZeroPP | None = None
        """The handle of zeropp; None before `fit` starts."""
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
                "zeropp: Lightning's checkpoint cannot hold a state of every rank, so zeropp's state is not "
                "saved; after a resume, all weights are sent again, error feedback starts at zero, and "
                "'auto' searches again. Save zpp.state_dict() on every rank to keep the state"
            )


def parallelize(
    function: Parallelize,
    config: Config | Literal["auto"] | None = None,
    *,
    overrides: Mapping[str, Config] | None = None,
) -> Parallelize:
    """Return a function that calls `function` and then applies zeropp, for Fabric's `ModelParallelStrategy`.

        strategy = ModelParallelStrategy(parallelize_fn=parallelize(shard, zeropp.Config()))

    `fabric.no_backward_sync` then accumulates inside the node.
    """

    def parallelize_and_apply(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        model = function(model, mesh)
        apply(model, config, overrides=overrides).follow_no_sync()
        return model

    return parallelize_and_apply
