"""A listener that writes the figures of a run for TensorBoard."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from .run_events import Evaluation, Listener, RunInfo, StepRecord


class TensorBoard(Listener):
    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise ValueError(
                "logging.tensorboard needs the package tensorboard: pip install 'zeropp[tensorboard]'"
            ) from None
        self._folder, self._make_writer = folder, SummaryWriter
        self._writer: Any = None  # from the start on

    def on_start(self, info: RunInfo) -> None:
        # What an earlier part of the run wrote after its checkpoint is hidden from this step on.
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
