"""Hugging Face: a callback for `transformers.Trainer` and all trainers of TRL.

[Note: Micro-batches]
Accelerate's `GradientState.sync_gradients` is True in the last micro-batch of a step. If Accelerate has
sharded the model, it also calls FSDP2's `no_sync`, which `follow_no_sync` turns into accumulation inside the
node. If transformers has sharded the model (`DistributedConfig`), Accelerate does not call `no_sync`, so a
hook reads `GradientState` before each forward. All ranks run the same loop, so they take the same branch.

[Note: Synced references]
TRL's `sync_ref_model` writes into the reference through `.data`, which no hook of torch sees, in a callback
that may run after ours. So a hook checks before each forward of the reference whether a sync happened since
the last one.
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
    """Applies zeropp to the model of a trainer at the start of training.

        trainer = Trainer(model, args, callbacks=[ZeroppCallback(zeropp.Config())], ...)

    Args:
        config: a Config, or "auto"; the default is `zeropp.Config()`.
        overrides: Configs of single units, as in `zeropp.apply`.
        others: other models sharded with FSDP2, such as the reference of DPO (`trainer.ref_model`; in this
            case add the callback with `trainer.add_callback`). With TRL's `sync_ref_model`, their weights are
            sent again after each sync, and only then.
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
                "config is 'auto' and others are given, but no optimizer steps the others, so 'auto' has no "
                "steps in which to try Configs; expected a zeropp.Config"
            )
        self.zpp: ZeroPP | None = None
        """The handle of zeropp on the trainer's model; None before training starts."""
        self.others: list[ZeroPP] = []
        """The handles on the other models."""
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
            load_state(self.zpp, _resumed_folder(args, state))
        self._remove_hooks()
        if not AcceleratorState().is_fsdp2:
            self._hooks.append(_set_sync_before_forward(model, self.zpp))
        for module, other in zip(self._models, self.others, strict=True):
            self._hooks.append(_invalidate_after_syncs(module, other, args, state))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.zpp is not None:
            save_state(self.zpp, _checkpoint_folder(args, state))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _set_sync_before_forward(model: nn.Module, zpp: ZeroPP) -> Any:
    """See [Note: Micro-batches]."""

    def set_sync(module: nn.Module, args: Any) -> None:
        if module.training:
            zpp.set_requires_cross_node_sync(GradientState().sync_gradients)

    return model.register_forward_pre_hook(set_sync, prepend=True)


def _invalidate_after_syncs(
    model: nn.Module, zpp: ZeroPP, args: TrainingArguments, state: TrainerState
) -> Any:
    """See [Note: Synced references]."""
    every: int = getattr(args, "sync_ref_model", False) and getattr(args, "ref_model_sync_steps", 0)
    last = state.global_step

    def invalidate(module: nn.Module, args: Any) -> None:
        nonlocal last
        if every and state.global_step // every != last // every:
            zpp.invalidate()
        last = state.global_step

    return model.register_forward_pre_hook(invalidate, prepend=True)


def _warn_if_sharded_unlike(zpp: ZeroPP, other: ZeroPP) -> None:
    ours, theirs = ([comms.unit.name for comms in one.unit_comms] for one in (zpp, other))
    if ours != theirs:
        logger.warning(
            "zeropp: another model has other units (%s) than the trained one (%s); quantization rounds equal "
            "weights differently in the two, so the first margins of DPO are not exactly zero",
            *(theirs, ours),
        )


def _checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder in which the trainer saves this step."""
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"


def _resumed_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder from which the trainer has resumed.

    `train(resume_from_checkpoint=...)` passes the path to the trainer only. A callback sees the arguments and
    the step, so the folder of this step has precedence.
    """
    named, own = args.resume_from_checkpoint, _checkpoint_folder(args, state)
    return Path(named) if isinstance(named, str) and not own.is_dir() else own
