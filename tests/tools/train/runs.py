"""A run with milliseconds per step, for tests on real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from zeropp import Config
from zeropp.tools.models.loading import ModelConfig
from zeropp.tools.train.config import (
    BatchConfig,
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    RunConfig,
)
from zeropp.tools.train.data import DataConfig
from zeropp.tools.train.loop import train
from zeropp.tools.train.metrics import MetricsFile
from zeropp.tools.train.run_events import RunListener, Summary
from zeropp.tools.train.world import World


def small_run(folder: Path, **changes: Any) -> RunConfig:
    """Return a run with two ranks per node. Its text is made once per folder."""
    text = folder / "text.txt"
    if not text.exists():
        folder.mkdir(parents=True, exist_ok=True)
        text.write_text("".join(f"{number} times {number} is {number * number}.\n" for number in range(2000)))
    run = RunConfig(
        folder=folder,
        steps=8,
        timeout_seconds=300.0,
        model=ModelConfig(layers=2, width=32, heads=2, context=32, precision="fp32"),
        data=DataConfig(source=str(text)),
        batch=BatchConfig(sequence=32, size=2, micro_batches=2),
        zeropp=Config(node_size=2),
        checkpoint=CheckpointConfig(every=4),
        evaluation=EvaluationConfig(every=4, batches=2),
        logging=LoggingConfig(every=1),
    )
    return replace(run, **changes)


def train_here(run: RunConfig, *listeners: RunListener) -> Summary:
    """Train on a rank of a pool, with a metrics file."""
    return train(run, World.current(), [MetricsFile(run.folder), *listeners])


def command_line(run: RunConfig) -> list[str]:
    """Return the options of `zeropp train` for the same run."""
    assert isinstance(run.zeropp, Config)
    return [
        *("--folder", str(run.folder), "--steps", str(run.steps), "--data.source", run.data.source),
        *("--timeout-seconds", str(run.timeout_seconds), "--model.precision", "fp32"),
        *("--model.layers", str(run.model.layers), "--model.width", str(run.model.width)),
        *("--model.heads", str(run.model.heads), "--model.context", str(run.model.context)),
        *("--batch.sequence", str(run.batch.sequence), "--batch.size", str(run.batch.size)),
        *("--batch.micro-batches", str(run.batch.micro_batches)),
        *("--zeropp.node-size", str(run.zeropp.node_size)),
        *("--checkpoint.every", str(run.checkpoint.every)),
        *("--evaluation.every", str(run.evaluation.every)),
        *("--evaluation.batches", str(run.evaluation.batches)),
    ]
