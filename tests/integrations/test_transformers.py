"""`transformers.Trainer` and TRL's trainers on real gloo ranks. Accelerate or transformers shards the
models."""

from __future__ import annotations

import logging
import logging.handlers
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import zeropp
from tests.configs import CONFIGS
from tests.ranks import Ranks, on_a_rank

if TYPE_CHECKING or on_a_rank():
    from accelerate import Accelerator
    from datasets import Dataset  # type: ignore[import-untyped]
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import (
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Trainer,
        TrainerCallback,
        TrainerState,
        TrainingArguments,
    )
    from transformers.distributed.configuration_utils import DistributedConfig
    from trl.models.utils import prepare_fsdp
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from tests.integrations.hugging_face import (
        VOCABULARY,
        forget_accelerators,
        make_llama,
        shard_on_cpu,
        with_lora,
    )
    from zeropp.integrations.transformers import ZeroppCallback

    class Sent(TrainerCallback):
        """Bytes across nodes of each step, from the ledgers of a callback's models."""

        def __init__(self, callback: ZeroppCallback) -> None:
            self.callback = callback
            self.model: list[int] = []
            self.others: list[int] = []

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            assert self.callback.zpp is not None
            for sent, zpps in ((self.model, [self.callback.zpp]), (self.others, self.callback.others)):
                sent.append(sum(zpp.ledger.total().across_bytes for zpp in zpps))
                for zpp in zpps:
                    zpp.ledger.reset()


OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "bf16": False,
}


def _never_steps() -> None:
    with pytest.raises(ValueError, match="config is 'auto' and others are given"):
        ZeroppCallback("auto", others=[nn.Linear(1, 1)])


def test_auto_is_refused_for_a_model_without_optimizer(ranks: Ranks) -> None:
    ranks.run(_never_steps, world=1)


def sequences(count: int = 64) -> Dataset:
    rows = [
        torch.randint(0, VOCABULARY, (16,), generator=torch.Generator().manual_seed(i)).tolist()
        for i in range(count)
    ]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def make_trainer(
    folder: str, config: zeropp.Config | None, model: nn.Module, **options: Any
) -> tuple[Trainer, Sent | None]:
    forget_accelerators()
    arguments = TrainingArguments(output_dir=folder, **OPTIONS | options)
    trainer = Trainer(model=model, args=arguments, train_dataset=sequences())
    shard_trainer(trainer)
    return trainer, add_zeropp(trainer, config)


def shard_trainer(trainer: Trainer) -> None:
    shard_on_cpu(trainer.accelerator)
    trainer.is_fsdp_enabled = True  # the trainer read it from the accelerator before


def add_zeropp(trainer: Trainer, config: zeropp.Config | None, others: Any = ()) -> Sent | None:
    if config is None:
        return None
    callback = ZeroppCallback(config, others=others)
    trainer.add_callback(callback)
    trainer.add_callback(sent := Sent(callback))
    return sent


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def per_parameter(sent: list[int], model: nn.Module) -> list[float]:
    """Return the bytes sent by a node of two ranks, per trained parameter."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return [2 * across / trained for across in sent]


def _train(
    folder: str, config: zeropp.Config | None, accumulate: int, lora: bool = False
) -> tuple[list[float], list[float]]:
    model = with_lora(make_llama(hidden=128)) if lora else make_llama()
    trainer, sent = make_trainer(folder, config, model, max_steps=3, gradient_accumulation_steps=accumulate)
    trainer.train()
    return losses_of(trainer), per_parameter(sent.model, model) if sent else []


@pytest.mark.parametrize("accumulate", [1, 4])
def test_off_is_plain_bit_for_bit_and_the_default_is_close(
    ranks: Ranks, tmp_path: Path, accumulate: int
) -> None:
    plain = ranks.run(_train, str(tmp_path), None, accumulate)
    off = ranks.run(_train, str(tmp_path), zeropp.Config.off(), accumulate)
    default = ranks.run(_train, str(tmp_path), CONFIGS["default"], accumulate)
    for (exact, _), (same, _), (close, sent) in zip(plain, off, default, strict=True):
        assert same == exact
        assert close == pytest.approx(exact, rel=0.01)
        assert all(0.5 < across < 0.85 for across in sent[1:])  # for any number of micro-batches


def test_lora_sends_only_trained_weights(ranks: Ranks, tmp_path: Path) -> None:
    for _, sent in ranks.run(_train, str(tmp_path), CONFIGS["default"], 1, True):
        assert sent[0] > 5  # the base, once
        assert sent[1:] == pytest.approx([0.791] * 2, abs=0.002)  # the figure of the docs


def _resume(config: zeropp.Config, folder: str) -> tuple[list[float], list[float]]:
    runs = []
    for checkpoint in (None, f"{folder}/checkpoint-2"):
        trainer, _ = make_trainer(
            folder, config, make_llama(), max_steps=4, save_strategy="steps", save_steps=2
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append(losses_of(trainer))
    return runs[0], runs[1]


@pytest.mark.parametrize("name", ["default", "four_bit"])
def test_a_resumed_run_continues_bit_for_bit(ranks: Ranks, tmp_path: Path, name: str) -> None:
    for whole, resumed in ranks.run(_resume, CONFIGS[name], str(tmp_path)):
        assert resumed[-2:] == whole[-2:]
    saved = list(tmp_path.glob("checkpoint-2/zeropp-rank*.pt"))
    assert len(saved) == (4 if name == "four_bit" else 0)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )


def sentences(seed: int, count: int = 32) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(2, VOCABULARY, (count, 8), generator=generator).tolist()
    return [" ".join(f"w{token}" for token in row) for row in rows]


def _sft(folder: str, config: zeropp.Config | None) -> list[float]:
    forget_accelerators()
    trainer = SFTTrainer(
        model=make_llama(),
        args=SFTConfig(output_dir=folder, max_steps=3, max_length=16, **OPTIONS),
        train_dataset=Dataset.from_dict({"text": sentences(0)}),
        processing_class=make_tokenizer(),
    )
    shard_trainer(trainer)
    add_zeropp(trainer, config)
    trainer.train()
    return losses_of(trainer)


def test_sft(ranks: Ranks, tmp_path: Path) -> None:
    plain = ranks.run(_sft, str(tmp_path), None)
    assert ranks.run(_sft, str(tmp_path), zeropp.Config.off()) == plain
    for close, exact in zip(ranks.run(_sft, str(tmp_path), CONFIGS["default"]), plain, strict=True):
        assert close == pytest.approx(exact, rel=0.01)


def _dpo(folder: str, config: zeropp.Config | None) -> tuple[list[float], list[int]]:
    """Return the losses, and the bytes across nodes of the reference in each of four steps. It is synced in
    every second one."""
    forget_accelerators()
    options = OPTIONS | {"max_steps": 4, "learning_rate": 1e-2}
    trainer = DPOTrainer(
        model=make_llama(),
        ref_model=make_llama(),
        args=DPOConfig(
            output_dir=folder,
            sync_ref_model=True,
            ref_model_sync_steps=2,
            ref_model_mixup_alpha=1.0,
            max_length=32,
            **options,
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": sentences(0), "chosen": sentences(1), "rejected": sentences(2)}
        ),
        processing_class=make_tokenizer(),
    )
    shard_trainer(trainer)
    trainer.ref_model = cast(Any, prepare_fsdp(trainer.ref_model, trainer.accelerator))
    sent = add_zeropp(trainer, config, [trainer.ref_model])
    trainer.train()
    return losses_of(trainer), sent.others if sent else []


def test_dpo_with_a_reference_that_is_synced(ranks: Ranks, tmp_path: Path) -> None:
    plain = ranks.run(_dpo, str(tmp_path), None)
    off = ranks.run(_dpo, str(tmp_path), zeropp.Config.off())
    for (exact, _), (same, _), (close, sent) in zip(
        plain, off, ranks.run(_dpo, str(tmp_path), CONFIGS["default"]), strict=True
    ):
        assert same == exact
        assert close == pytest.approx(exact, rel=0.05)
        assert [bool(across) for across in sent] == [True, False, True, False]


def _sharded_by_transformers(
    folder: str, pretrained: str, config: zeropp.Config | None, accumulate: int
) -> tuple[list[float], list[float]]:
    forget_accelerators()
    model = LlamaForCausalLM.from_pretrained(
        pretrained, distributed_config=DistributedConfig(fsdp_size=4), use_cache=False
    )
    arguments = TrainingArguments(
        output_dir=folder, max_steps=3, gradient_accumulation_steps=accumulate, **OPTIONS
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=sequences())
    sent = add_zeropp(trainer, config)
    trainer.train()
    return losses_of(trainer), per_parameter(sent.model, model) if sent else []


def _save_pretrained(folder: str) -> None:
    make_llama().save_pretrained(folder)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_that_transformers_shards(ranks: Ranks, tmp_path: Path, accumulate: int) -> None:
    pretrained = str(tmp_path / "pretrained")
    ranks.run(_save_pretrained, pretrained, world=1)
    plain = ranks.run(_sharded_by_transformers, str(tmp_path), pretrained, None, accumulate)
    off = ranks.run(_sharded_by_transformers, str(tmp_path), pretrained, zeropp.Config.off(), accumulate)
    assert [losses for losses, _ in off] == [losses for losses, _ in plain]
    default = ranks.run(_sharded_by_transformers, str(tmp_path), pretrained, CONFIGS["default"], accumulate)
    for (exact, _), (close, sent) in zip(plain, default, strict=True):
        assert close == pytest.approx(exact, rel=0.01)
        assert all(0.5 < across < 0.85 for across in sent[1:])


def _warnings_of_references() -> list[list[str]]:
    """Return the warnings for a reference with the policy's units, and for one with other units."""
    forget_accelerators()
    log = logging.handlers.MemoryHandler(100)
    logging.getLogger("zeropp").addHandler(log)
    policy, same, other = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
    for model in (policy, same):
        fully_shard(model[0])
    warnings = []
    for reference in (same, other):
        for model in (policy, reference):
            fully_shard(model)
        callback = ZeroppCallback(CONFIGS["default"], others=[reference])
        arguments = TrainingArguments(use_cpu=True)
        Accelerator(cpu=True)  # a trainer makes one, too
        log.buffer.clear()
        callback.on_train_begin(arguments, TrainerState(), None, model=policy)  # type: ignore[arg-type]
        warnings.append([record.getMessage() for record in log.buffer if record.levelname == "WARNING"])
        policy = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        fully_shard(policy[0])
    logging.getLogger("zeropp").removeHandler(log)
    return warnings


def test_a_reference_with_other_units_than_the_policy_is_warned_of(ranks: Ranks) -> None:
    for same, other in ranks.run(_warnings_of_references):
        assert not any("has other units" in message for message in same)
        assert any("has other units" in message for message in other)
