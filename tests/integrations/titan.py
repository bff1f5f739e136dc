"""torchtitan on ranks of a test: its trainer on CPU, its debug Llama, and data.

Only ranks import this module: torchtitan takes seconds to import, and pytest turns torch's warnings in it
into errors.

[Note: torchtitan on CPU]
torchtitan supports accelerators only. This module changes the following, and nothing else:
- `device_type` and `device_module` in each module of torchtitan that has imported them
- the sleep of two seconds after training, which is removed
- `torch.distributed.set_timeout`, which torch 2.13 lacks and which is added here
- the backend "spmd_types", which torch 2.13's `fully_shard` refuses; the tests choose "partial_dtensor"
- FSDP2's reduction: gloo has no PREMUL_SUM, so a wrapped `parallelize_fn` chooses a plain sum
The rest is torchtitan's code with public settings: SDPA attention (the default compiles a kernel at the first
call), two layers, and the data of this module.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.components.metrics
import torchtitan.distributed.parallel_dims
import torchtitan.distributed.utils
import torchtitan.tools.profiler
import torchtitan.tools.utils
import torchtitan.trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ConfigManager
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.config_registry import llama3_debugmodel, llama3_debugmodel_ce_loss
from torchtitan.trainer import Trainer

from tests.configs import CONFIGS
from tests.integrations.environment import set_environment
from zeropp.integrations.torchtitan import with_zeropp

VOCABULARY = 2048
LENGTH = 16


class Cpu:
    """The interface of a device module, with one device per process."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any) -> str:
        return "CPU"

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...


def run_on_cpu() -> None:
    """See [Note: torchtitan on CPU]."""
    for module in (
        torchtitan.tools.utils,
        torchtitan.tools.profiler,
        torchtitan.components.metrics,
        torchtitan.distributed.utils,
        torchtitan.distributed.parallel_dims,
    ):
        vars(module).update(device_type="cpu", device_module=Cpu())
    vars(torchtitan.trainer)["time"] = SimpleNamespace(
        **vars(torchtitan.trainer.time) | {"sleep": lambda _: None}
    )
    if not hasattr(dist, "set_timeout"):
        vars(dist)["set_timeout"] = dist.distributed_c10d._set_pg_timeout


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    """A tokenizer that is never called: the data are tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Tokens(BaseDataLoader):  # type: ignore[misc]
    """Random tokens, different on each rank. A checkpoint holds the position."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, **kwargs: Any) -> None:
        self.rank, self.sequences, self.batches = dp_rank, local_batch_size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.batches + self.rank)
            self.batches += 1
            tokens = torch.randint(0, VOCABULARY, (self.sequences, LENGTH + 1), generator=generator)
            positions = torch.arange(LENGTH).expand(self.sequences, -1)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {f"rank{self.rank}": pickle.dumps(self.batches)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = pickle.loads(state[f"rank{self.rank}"])


def _parallelize(model: nn.Module, **options: Any) -> nn.Module:
    """Force a plain sum: FSDP2 uses PREMUL_SUM for torchtitan's divide factor, and gloo does not have it."""
    parallelize_llama(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def trainer_config(
    folder: str, *, steps: int = 2, accumulate: int = 1, chunked_loss: bool = False, saves: bool = False
) -> Trainer.Config:
    """Return the config of torchtitan's debug Llama with two layers, for four ranks."""
    set_environment()
    run_on_cpu()
    config = llama3_debugmodel() if chunked_loss else llama3_debugmodel_ce_loss()
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.parallelism.spmd_backend = "partial_dtensor"
    config.model_spec.parallelize_fn = _parallelize
    config.dump_folder = folder
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Tokens.Config()
    config.training.steps, config.training.seq_len = steps, LENGTH
    config.training.local_batch_size, config.training.global_batch_size = 1, 4 * accumulate
    config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_ratio = 0, 0.0
    config.checkpoint = CheckpointManager.Config(enable=saves, interval=2, last_save_model_only=False)
    config.debug.seed = 0
    return config


def configured() -> Trainer.Config:
    """Return the config for `--module tests.integrations.titan --config configured`."""
    return with_zeropp(trainer_config(""), CONFIGS["default"])


def parse(arguments: list[str]) -> Trainer.Config:
    """Return the config that `torchtitan.train` parses."""
    return ConfigManager().parse_args(arguments)


def train(config: Trainer.Config) -> tuple[list[float], Trainer]:
    """Train, and return torchtitan's loss of each step and the trainer. Its ledger starts with the second
    step."""
    trainer = config.build()
    losses: list[float] = []
    log = trainer.metrics_processor.log

    def record(step: int, average_loss: float, *args: Any, **kwargs: Any) -> None:
        if not losses and hasattr(trainer, "zpp"):
            trainer.zpp.ledger.reset()
        losses.append(average_loss)
        log(step, average_loss, *args, **kwargs)

    trainer.metrics_processor.log = record
    trainer.train()
    trainer.close()
    return losses, trainer
