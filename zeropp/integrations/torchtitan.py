"""torchtitan: `with_zeropp` for the config of a trainer, or `attach` for a built trainer.

[Note: Micro-batches of torchtitan]
torchtitan's trainer reduces gradients in every micro-batch and has no hook between micro-batches. So `attach`
wraps `forward_backward_step` of the trainer to count micro-batches, and `train_step` to reset the count, also
after an aborted step. A custom trainer may call `forward_backward_step` fewer times than
`gradient_accumulation_steps`. Gradients are then pending, and zeropp refuses the optimizer's step.

zeropp does not change FSDP2's own switch, `set_requires_gradient_sync`, because torchtitan's chunked loss
uses it for the head. A flat route has no other switch, so it reduces every micro-batch, as without zeropp.
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
    """Return the config with a `build` that also applies zeropp to the trainer.

        def llama3_8b_zeropp():  # in a file my_run.py
            return with_zeropp(llama3_8b(), zeropp.Config())

        torchrun ... -m torchtitan.train --module my_run --config llama3_8b_zeropp

    It accepts the config of any trainer that derives from torchtitan's. `trainer.zpp` is the handle of
    zeropp. The config gets `training.disable_cuda_graphs`, because a captured gather would replay old
    weights.
    """
    parent: Any = type(trainer_config)

    @dataclass(kw_only=True)
    class WithZeropp(parent):  # type: ignore[misc]
        # No flag on torchtitan's command line: the Config is chosen in Python, next to the model.
        zeropp: Annotated[Config | Literal["auto"], tyro.conf.Suppress]

        def build(self, **kwargs: Any) -> Any:
            if not self.training.disable_cuda_graphs:
                logger.info(
                    "zeropp: set training.disable_cuda_graphs: captured gathers would replay old weights"
                )
                self.training.disable_cuda_graphs = True
            trainer = super().build(**kwargs)
            if not self.checkpoint.create_seed_checkpoint:  # torchtitan does not shard for a seed checkpoint
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
    """Apply zeropp to a torchtitan trainer before it trains. Call it on every rank.

        trainer = trainer_config.build()
        zeropp.integrations.torchtitan.attach(trainer, zeropp.Config())
        trainer.train()

    Micro-batches of a step accumulate inside the node. Checkpoints include zeropp's state, in one file per
    rank. CUDA graphs must be off: `--training.disable_cuda_graphs`.
    """
    if (degree := trainer.config.parallelism.pipeline_parallel_degree) > 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree is {degree}; expected 1: zeropp was never run with a "
            "pipeline schedule, which decides when gradients are reduced. To try it, call zeropp.apply on "
            "each of trainer.model_parts"
        )
    zpp = apply(trainer.model_parts[0], config, overrides=overrides)
    trainer.zpp = zpp
    _accumulate_in_node(trainer, zpp)
    if trainer.config.checkpoint.enable and zpp.has_history:
        _checkpoint_state(trainer, zpp)
    return zpp


def _accumulate_in_node(trainer: Trainer, zpp: ZeroPP) -> None:
    """See [Note: Micro-batches of torchtitan]."""
    train_step, forward_backward_step = trainer.train_step, trainer.forward_backward_step
    micro_batches = steps = 0

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal micro_batches, steps
        if steps == 1:  # torchtitan sets the timeout after the first step, but only of its own groups
            zpp.set_timeout(timedelta(seconds=trainer.config.comm.train_timeout_seconds))
        micro_batches, steps = 0, steps + 1
        return train_step(*args, **kwargs)

    def micro_batch(*args: Any, **kwargs: Any) -> Any:
        nonlocal micro_batches
        micro_batches += 1
        if zpp.config.route == "two-hop":
            zpp.set_requires_cross_node_sync(micro_batches == trainer.gradient_accumulation_steps)
        return forward_backward_step(*args, **kwargs)

    trainer.train_step, trainer.forward_backward_step = step, micro_batch


def _checkpoint_state(trainer: Trainer, zpp: ZeroPP) -> None:
    """Save and load zeropp's state with the trainer's checkpoints."""
    manager, config = trainer.checkpointer, trainer.config.checkpoint
    if "://" in manager.folder:
        logger.warning(
            "zeropp: checkpoint.folder is %s, but zeropp's state is saved to local folders only; after a "
            "resume, all weights are sent again and error feedback starts at zero. Save zpp.state_dict() on "
            "every rank to keep the state",
            manager.folder,
        )
        return
    save, load = manager.save, manager.load

    def folder(step: int) -> Path:
        return Path(manager.folder) / f"step-{step}"

    def save_both(curr_step: int, last_step: bool = False) -> bool:
        saved: bool = save(curr_step, last_step=last_step)
        if saved and not (last_step and config.last_save_model_only):  # no run resumes from only a model
            save_state(zpp, folder(curr_step))
        return saved

    def load_both(step: int = -1) -> bool:
        loaded: bool = load(step)
        if loaded and trainer.step:  # at step 0 only the model was loaded, and a new run starts
            own = folder(trainer.step)
            load_state(zpp, own if own.is_dir() else Path(config.initial_load_path or own))
        return loaded

    manager.save, manager.load = save_both, load_both
