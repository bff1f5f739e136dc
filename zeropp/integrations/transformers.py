"""Hugging Face: a callback for `transformers.Trainer`, and for every trainer of TRL.

[Note: Micro-batches]
Accelerate says by `GradientState` whether gradients of this micro-batch are the last of a step. If it has
sharded the model itself, it also tells FSDP2 (`no_sync`), which `follow_no_sync` turns into accumulation
inside the node. A model that transformers has sharded (`DistributedConfig`) is not known to it, so there the
callback asks before each forward. All ranks run the same loop.

[Note: Synced references]
TRL's `sync_ref_model` writes into the reference through `.data`, of which nobody is told, in a callback that
may run after ours. So the reference asks before each forward whether there was a sync since the last one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from accelerate.state import AcceleratorState, GradientState
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .. import Config, ZeroPP, apply
from .state_files import load_state, save_state

logger = logging.getLogger("zeropp")


class ZeroppCallback(TrainerCallback):
    """zeropp on the model of a trainer, from the begin of training on.

        trainer = Trainer(model, args, callbacks=[ZeroppCallback(zeropp.Config())], ...)

    Args:
        config: what to send, or "auto"; the default is `zeropp.Config()`.
        overrides: other Configs for some units, as in `zeropp.apply`.
        others: further models that FSDP2 shards, like the reference of DPO (`trainer.ref_model`, so add the
            callback with `trainer.add_callback`). With TRL's `sync_ref_model` their weights are sent anew
            after each sync, and only then.
    """

    def __init__(
        self,
        config: Config | Literal["auto"] | None = None,
        *,
        overrides: Mapping[str, Config] | None = None,
        others: Sequence[nn.Module] = (),
    ) -> None:
        if config == "auto" and others:
            raise ValueError(
                "config is 'auto' with others, whose weights no optimizer changes: there are no steps in "
                "which a Config could be tried; give a zeropp.Config"
            )
        self.zpp: ZeroPP | None = None
        """zeropp on the trainer's model, once training has begun, ..."""
        self.others: list[ZeroPP] = []
        """... and on the others."""
        self._config, self._overrides, self._models = config, overrides, list(others)
        self._hooks: list[Any] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: nn.Module = kwargs["model"]
        self.zpp = apply(model, self._config, overrides=self._overrides)
        self.zpp.follow_no_sync()
        self.others = [apply(other, self._config, overrides=self._overrides) for other in self._models]
        for other in self.others:
            _warn_if_sharded_unlike(self.zpp, other)
        if state.global_step:
            load_state(self.zpp, _resumed(args, state))
        self._remove_hooks()
        if not AcceleratorState().is_fsdp2:
            self._hooks.append(_ask_before_forward(model, self.zpp))
        for module, other in zip(self._models, self.others, strict=True):
            self._hooks.append(_watch_syncs(module, other, args, state))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.zpp is not None:
            save_state(self.zpp, _checkpoint(args, state))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _ask_before_forward(model: nn.Module, zpp: ZeroPP) -> Any:
    """See [Note: Micro-batches]."""

    def ask(module: nn.Module, args: Any) -> None:
        if module.training:
            zpp.set_requires_cross_node_sync(GradientState().sync_gradients)

    return model.register_forward_pre_hook(ask, prepend=True)


def _watch_syncs(model: nn.Module, zpp: ZeroPP, args: TrainingArguments, state: TrainerState) -> Any:
    """See [Note: Synced references]."""
    every: int = getattr(args, "sync_ref_model", False) and getattr(args, "ref_model_sync_steps", 0)
    last = state.global_step

    def look(module: nn.Module, args: Any) -> None:
        nonlocal last
        if every and state.global_step // every != last // every:
            zpp.invalidate()
        last = state.global_step

    return model.register_forward_pre_hook(look, prepend=True)


def _warn_if_sharded_unlike(zpp: ZeroPP, other: ZeroPP) -> None:
    ours, theirs = ([comms.unit.name for comms in one.unit_comms] for one in (zpp, other))
    if ours != theirs:
        logger.warning(
            "zeropp: another model is sharded unlike the trained one (units %s and %s): equal weights are "
            "rounded to other numbers there, so the first margins of DPO are not exactly zero",
            *(theirs, ours),
        )


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder that the trainer saves this step to."""
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"


def _resumed(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder that the trainer has resumed from, as far as a callback can know."""
    named, own = args.resume_from_checkpoint, _checkpoint(args, state)
    return Path(named) if isinstance(named, str) and not own.is_dir() else own
