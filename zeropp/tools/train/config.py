"""The configuration of a training run: a tree of frozen dataclasses. `RunConfig()` trains a tiny GPT.

`read_toml` reads it from a TOML file. `zeropp train` has an option for every field, such as
`--optimizer.learning-rate 1e-3`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from ... import Config
from ..models.loading import ModelConfig
from ..strategies import PRESETS, PresetName
from .data import DataConfig
from .read_config import read

Preset = Literal[PresetName, "auto"]


@dataclass(frozen=True)
class BatchConfig:
    """The size of a batch: tokens per step = ranks x micro_batches x size x sequence."""

    sequence: int = 128
    """Tokens per sequence."""
    size: int = 4
    """Sequences per rank and micro-batch."""
    micro_batches: int = 2
    """Backward passes per optimizer step."""
    sync: Literal["step", "micro-batch"] = "step"
    """When gradients cross nodes. "step": once, in the last micro-batch. Until then zeropp accumulates inside
    the node, and plain FSDP2 (a flat route) holds gradients of the whole model on every rank.
    "micro-batch": in every micro-batch, which needs the least memory."""

    def __post_init__(self) -> None:
        _check_positive("batch", self, "sequence", "size", "micro_batches")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW."""

    learning_rate: float = 2e-3
    """Peak learning rate, reached at the end of the warmup."""
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Weight decay of matrices; norms and biases have none."""
    clip_norm: float = 1.0
    """Norm to which larger gradients are scaled down; 0: no clipping."""

    def __post_init__(self) -> None:
        _check_positive("optimizer", self, "learning_rate", "epsilon")
        _check("optimizer.betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "two from 0 to 1")
        for name in ("weight_decay", "clip_norm"):
            value = getattr(self, name)
            _check(f"optimizer.{name}", value, value >= 0, "a number, or 0 for none")


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate's schedule: a linear warmup, then a cosine decay until the last step."""

    warmup_steps: int = 20
    final_fraction: float = 0.1
    """Learning rate of the last step, as a fraction of the peak."""

    def __post_init__(self) -> None:
        _check("schedule.warmup_steps", self.warmup_steps, self.warmup_steps >= 0, "a number of steps")
        inside = 0.0 <= self.final_fraction <= 1.0
        _check("schedule.final_fraction", self.final_fraction, inside, "a fraction from 0 to 1")

    def learning_rate(self, step: int, steps: int, peak: float) -> float:
        """Return the rate of `step`, which counts from 1 to `steps`.

        >>> schedule = ScheduleConfig(warmup_steps=2, final_fraction=0.1)
        >>> [round(schedule.learning_rate(step, 6, 1.0), 3) for step in range(1, 7)]
        [0.5, 1.0, 0.868, 0.55, 0.232, 0.1]
        """
        if step <= self.warmup_steps:
            return peak * step / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return peak * (self.final_fraction + (1 - self.final_fraction) * cosine)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints in FOLDER/checkpoints, every few steps, at the end, and when the run is stopped."""

    every: int = 100
    """Steps between two checkpoints; 0: only at the end."""
    keep: int = 2
    """Number of checkpoints to keep; older ones are removed."""

    def __post_init__(self) -> None:
        _check("checkpoint.every", self.every, self.every >= 0, "a number of steps, or 0 for none on the way")
        _check_positive("checkpoint", self, "keep")


@dataclass(frozen=True)
class EvaluationConfig:
    """The loss on held-out data."""

    every: int = 50
    """Steps between two evaluations; 0: only at the end."""
    batches: int = 8
    """Micro-batches per rank."""

    def __post_init__(self) -> None:
        _check("evaluation.every", self.every, self.every >= 0, "a number of steps, or 0 for none on the way")
        _check_positive("evaluation", self, "batches")


@dataclass(frozen=True)
class LoggingConfig:
    """Output besides FOLDER/metrics.jsonl, which always has every step."""

    every: int = 10
    """Steps between two printed lines, if the output is not a terminal."""
    tensorboard: bool = False
    """Also write FOLDER/tensorboard (needs the extra `tensorboard`)."""
    peak_tflops: float = 0.0
    """Peak of one device, for the model FLOPs utilisation; 0: from a list of known devices."""

    def __post_init__(self) -> None:
        _check_positive("logging", self, "every")
        _check("logging.peak_tflops", self.peak_tflops, self.peak_tflops >= 0, "TFLOP/s, or 0 if unknown")


@dataclass(frozen=True)
class RunConfig:
    """One training run."""

    folder: Path = Path("runs/train")
    """Folder of metrics and checkpoints, on a file system that all nodes share."""
    steps: int = 250
    """Optimizer steps."""
    seed: int = 0
    """Seed of the initial weights, the order of the data, and all other random numbers."""
    resume: str = "auto"
    """"auto": resume from the last complete checkpoint in `folder`, or start if there is none. "never":
    start, and refuse a folder that has checkpoints. Or the folder of a checkpoint."""
    timeout_seconds: float = 600.0
    """Seconds until a collective that waits for another rank fails."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model, and how a device runs it."""
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    zeropp: Annotated[Config | Literal["auto"], tyro.conf.AvoidSubcommands] = field(default_factory=Config)
    """zeropp's Config, or "auto": the Config that is fastest in the first steps."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "timeout_seconds"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "a positive number")
        _check("seed", self.seed, self.seed >= 0, "0 or a positive number")


def read_run(values: Mapping[str, Any], preset: Preset | None = None) -> RunConfig:
    """Return a RunConfig from nested tables. `[zeropp]` may name a preset, which its other keys change:

    >>> read_run({"steps": 10, "zeropp": {"preset": "paper", "block_size": 256}}).zeropp.gradients_in_node
    'int4'
    >>> read_run({"optimizer": {"learning_rat": 1}})
    Traceback (most recent call last):
    ...
    ValueError: optimizer.learning_rat is not a key; expected one of learning_rate, betas, epsilon, \
weight_decay, clip_norm
    """
    table = dict(values)
    zeropp = table.pop("zeropp", {})
    if not isinstance(zeropp, Mapping):
        raise ValueError(f"zeropp is {zeropp!r}; expected a table, such as [zeropp] with preset = 'paper'")
    changes = dict(zeropp)
    name = preset or changes.pop("preset", "default")
    changes.pop("preset", None)
    if name == "auto":
        if changes:
            raise ValueError(
                f"zeropp.{next(iter(changes))} is given with preset 'auto', which chooses the whole Config; "
                "choose another preset, or leave the key out"
            )
        return read(RunConfig, table | {"zeropp": name})
    if name not in PRESETS:
        raise ValueError(f"zeropp.preset is {name!r}; expected one of {', '.join(get_args(Preset))}")
    known = [f.name for f in fields(Config)]
    if unknown := [key for key in changes if key not in known]:
        raise ValueError(f"zeropp.{unknown[0]} is not a key; expected one of {', '.join(['preset', *known])}")
    return read(RunConfig, table | {"zeropp": PRESETS[name](**changes)})


def read_toml(path: Path, preset: Preset | None = None) -> RunConfig:
    """Return a RunConfig from a TOML file; keys that the file leaves out have their defaults."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); expected a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    try:
        return read_run(values, preset)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _check(name: str, value: object, is_right: bool, expected: str) -> None:
    if not is_right:
        raise ValueError(f"{name} is {value!r}; expected {expected}")


def _check_positive(where: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _check(f"{where}.{name}", value, value > 0, "a positive number")
