"""`transformers.Trainer` on real gloo ranks, with models that transformers or Accelerate shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import zeropp
from tests.configs import CONFIGS
from tests.integrations.hugging_face import (
    VOCABULARY,
    forget_accelerators,
    make_llama,
    shard_on_cpu,
    with_lora,
)
from tests.ranks import Ranks
from zeropp.integrations.transformers import ZeroppCallback


class Sequences(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        data = torch.randint(0, VOCABULARY, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": data, "labels": data}


def make_trainer(
    folder: str, config: zeropp.Config | None, *, steps: int, lora: bool = False, **options: Any
) -> tuple[Trainer, ZeroppCallback | None]:
    forget_accelerators()
    callback = None if config is None else ZeroppCallback(config)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    model = make_llama(hidden=128 if lora else 64)
    trainer = Trainer(
        model=with_lora(model) if lora else model,
        args=arguments,
        train_dataset=Sequences(),
        callbacks=[] if callback is None else [callback],
    )
    shard_on_cpu(trainer.accelerator)
    return trainer, callback


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _train(folder: str, config: zeropp.Config | None, accumulate: int) -> tuple[list[float], float]:
    """Losses, and bytes across nodes per parameter of the last step."""
    trainer, callback = make_trainer(folder, config, steps=4, gradient_accumulation_steps=accumulate)
    sent: list[int] = []
    if callback is not None:
        from transformers import TrainerCallback

        class Count(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                assert callback is not None
                assert callback.zpp is not None
                sent.append(callback.zpp.ledger.total().across_bytes)

        trainer.add_callback(Count())
    trainer.train()
    parameters = sum(p.numel() for p in trainer.model.parameters())
    return losses_of(trainer), 2 * (sent[-1] - sent[-2]) / parameters if sent else 0.0


@pytest.mark.parametrize("accumulate", [1, 4])
def test_trains_like_plain(ranks: Ranks, tmp_path: Path, accumulate: int) -> None:
    plain = ranks.run(_train, str(tmp_path), None, accumulate)
    off = ranks.run(_train, str(tmp_path), zeropp.Config.off(), accumulate)
    default = ranks.run(_train, str(tmp_path), CONFIGS["default"], accumulate)
    for (exact, _), (same, _), (close, sent) in zip(plain, off, default, strict=True):
        assert same == exact
        assert close == pytest.approx(exact, rel=0.01)
        assert sent < 0.85
