"""A listener that writes a run's metrics for TensorBoard."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from .run_events import Evaluation, RunInfo, RunListener, StepRecord


class TensorBoard(RunListener):
    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise ValueError(
                "logging.tensorboard needs the package tensorboard: pip install 'zeropp[tensorboard]'"
            ) from None
        self._folder, self._make_writer = folder, SummaryWriter
        self._writer: Any = None  # made in on_start, which has the first step

    def on_start(self, info: RunInfo) -> None:
        # purge_step hides the steps after the checkpoint, which the resumed run repeats.
        self._writer = self._make_writer(str(self._folder), purge_step=info.first_step)

    def on_step(self, record: StepRecord) -> None:
        values = asdict(record) | {"tokens_per_second": record.tokens_per_second}
        for name, value in values.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(f"train/{name}", value, record.step)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._writer.add_scalar("validation/loss", evaluation.validation_loss, evaluation.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
