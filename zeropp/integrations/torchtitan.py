"""torchtitan: `with_zeropp` around the config of a trainer, or `attach` on a trainer that is built.

[Note: Micro-batches of torchtitan]
Its trainer reduces gradients in every micro-batch, and has no hook between them. So `forward_backward_step`
of the one trainer is wrapped, and counts; `train_step` is wrapped to start counting anew, also after a step
that was given up. If a trainer of somebody's own calls it less often than `gradient_accumulation_steps` says,
the optimizer's step is refused, because gradients are pending. FSDP2's switch must stay what it is: the
chunked loss turns it off for the head while it goes through its chunks. On a flat route that switch is all
there is, so there every micro-batch is reduced, as without zeropp.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from .. import Config, ZeroPP, apply
from .state_files import load_state, save_state

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

logger = logging.getLogger("zeropp")


def with_zeropp(
    trainer_config: Trainer.Config,
    config: Config | Literal["auto"] | None = None,
    *,
    overrides: Mapping[str, Config] | None = None,
) -> Trainer.Config:
    """The same config of a trainer, which builds one with zeropp:

        def llama3_8b_zeropp():  # in a file my_run.py
            return with_zeropp(llama3_8b(), zeropp.Config())

        torchrun ... -m torchtitan.train --module my_run --config llama3_8b_zeropp

    Works for configs of any trainer that derives from torchtitan's; `training.disable_cuda_graphs` is set in
    it, because a captured gather would replay old weights. What `attach` returns is `trainer.zpp`.
    """
    parent: Any = type(trainer_config)

    @dataclass(kw_only=True)
    class WithZeropp(parent):  # type: ignore[misc]
        # Suppressed: torchtitan wants no new flags, and a Config is written where the model is chosen.
        zeropp: Annotated[Config | Literal["auto"], tyro.conf.Suppress]

        def build(self, **kwargs: Any) -> Any:
            if not self.training.disable_cuda_graphs:
                logger.info(
                    "zeropp: sets training.disable_cuda_graphs; captured gathers would replay old weights"
                )
                self.training.disable_cuda_graphs = True
            trainer = super().build(**kwargs)
            if not self.checkpoint.create_seed_checkpoint:  # for which torchtitan shards nothing
                attach(trainer, self.zeropp, overrides=overrides)
            return trainer

    given = {field.name: getattr(trainer_config, field.name) for field in fields(trainer_config)}
    return WithZeropp(**given, zeropp=Config() if config is None else config)


def attach(
    trainer: Trainer,
    config: Config | Literal["auto"] | None = None,
    *,
    overrides: Mapping[str, Config] | None = None,
) -> ZeroPP:
    """zeropp on a trainer of torchtitan that has not begun to train; call it on every rank.

        trainer = trainer_config.build()
        zeropp.integrations.torchtitan.attach(trainer, zeropp.Config())
        trainer.train()

    Micro-batches of a step accumulate inside the node; checkpoints take along what zeropp keeps, a file for
    each rank. CUDA graphs must be off: `--training.disable_cuda_graphs`.
    """
    if (degree := trainer.config.parallelism.pipeline_parallel_degree) > 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree is {degree}; expected 1: a pipeline schedule reduces "
            "gradients in its own way, with which zeropp was never run. Call zeropp.apply on each of "
            "trainer.model_parts to try it"
        )
    zpp = apply(trainer.model_parts[0], config, overrides=overrides)
    trainer.zpp = zpp
    _accumulate_in_node(trainer, zpp)
    if trainer.config.checkpoint.enable and zpp.has_history:
        _take_along(trainer, zpp)
    return zpp


def _accumulate_in_node(trainer: Trainer, zpp: ZeroPP) -> None:
    """See [Note: Micro-batches of torchtitan]."""
    train_step, forward_backward_step = trainer.train_step, trainer.forward_backward_step
    done = steps = 0

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal done, steps
        if steps == 1:  # torchtitan sets it after the first step, for groups that it knows
            zpp.set_timeout(timedelta(seconds=trainer.config.comm.train_timeout_seconds))
        done, steps = 0, steps + 1
        return train_step(*args, **kwargs)

    def micro_batch(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        done += 1
        if zpp.config.route == "two-hop":
            zpp.set_requires_cross_node_sync(done == trainer.gradient_accumulation_steps)
        return forward_backward_step(*args, **kwargs)

    trainer.train_step, trainer.forward_backward_step = step, micro_batch


def _take_along(trainer: Trainer, zpp: ZeroPP) -> None:
    """Let checkpoints of the trainer have zeropp's files beside them."""
    manager, settings = trainer.checkpointer, trainer.config.checkpoint
    if "://" in manager.folder:
        logger.warning(
            "zeropp: checkpoint.folder is %s; what every rank keeps is saved to local folders only, so a "
            "resumed run sends its weights anew, and kept errors start at zero; save zpp.state_dict() on "
            "every rank yourself",
            manager.folder,
        )
        return
    save, load = manager.save, manager.load

    def folder(step: int) -> Path:
        return Path(manager.folder) / f"step-{step}"

    def save_both(curr_step: int, last_step: bool = False) -> bool:
        saved: bool = save(curr_step, last_step=last_step)
        if saved and not (last_step and settings.last_save_model_only):  # nothing to go on from
            save_state(zpp, folder(curr_step))
        return saved

    def load_both(step: int = -1) -> bool:
        loaded: bool = load(step)
        if loaded and trainer.step:  # 0: only the model was loaded, and a new run begins
            own = folder(trainer.step)
            load_state(zpp, own if own.is_dir() else Path(settings.initial_load_path or own))
        return loaded

    manager.save, manager.load = save_both, load_both
