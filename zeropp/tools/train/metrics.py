"""metrics.jsonl: one line of JSON per step of a run, across restarts.

    {"kind": "start", "config": {...}, "parameters": 278000, "ranks": 4, ...}
    {"kind": "step", "step": 1, "loss": 5.5, ...}
    {"kind": "evaluation", "step": 50, "validation_loss": 2.7}
    {"kind": "end", "step": 250, "is_complete": true, ...}

Each line is written at once. A resumed run first removes the lines of steps after its checkpoint, because it
repeats these steps. So the file always has every step of one run once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from ..atomic_files import write_file
from .run_events import Evaluation, RunInfo, RunListener, StepRecord, Summary

FILE_NAME = "metrics.jsonl"
R = TypeVar("R", RunInfo, StepRecord, Evaluation, Summary)


class MetricsFile(RunListener):
    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME

    def on_start(self, info: RunInfo) -> None:
        if self._path.exists():
            _drop_steps_from(self._path, info.first_step)
        self._write("start", info)

    def on_step(self, record: StepRecord) -> None:
        self._write("step", record)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._write("evaluation", evaluation)

    def on_end(self, summary: Summary) -> None:
        self._write("end", summary)

    def _write(self, kind: str, record: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, **asdict(record)}) + "\n")


class Metrics:
    """The contents of a metrics file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = _lines(path)
        self.starts = [_record(RunInfo, line, path) for line in lines if line["kind"] == "start"]
        """One per start or resume of the run."""
        self.steps = [_record(StepRecord, line, path) for line in lines if line["kind"] == "step"]
        self.evaluations = [_record(Evaluation, line, path) for line in lines if line["kind"] == "evaluation"]
        ends = [_record(Summary, line, path) for line in lines if line["kind"] == "end"]
        self.end: Summary | None = ends[-1] if ends else None
        """Summary of the last part of the run that ended without an error; None if there is none."""
        if not self.starts or not self.steps:
            raise ValueError(f"{path} has no steps; expected a metrics.jsonl of zeropp train")

    @property
    def info(self) -> RunInfo:
        return self.starts[-1]

    @property
    def across_bytes_per_step(self) -> float:
        """Bytes between nodes per step: the sum over all nodes, averaged over the steps."""
        return sum(record.across_bytes for record in self.steps) / len(self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Median over the steps, which ignores slow first steps and a busy machine."""
        speeds = sorted(record.tokens_per_second for record in self.steps)
        return speeds[len(speeds) // 2]


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        texts = path.read_text().splitlines(keepends=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); expected a metrics.jsonl") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read ({error}); expected a metrics.jsonl") from None
    lines = []
    for number, text in enumerate(texts, 1):
        if not text.endswith("\n"):
            break  # an incomplete last line: the run is still writing, or was killed
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            line = None
        if not isinstance(line, dict) or "kind" not in line:
            raise ValueError(f"{path}, line {number} is {text[:80]!r}; expected a line of zeropp train")
        lines.append(line)
    return lines


def _record(kind: type[R], line: dict[str, Any], path: Path) -> R:
    try:
        return kind(**{field.name: line[field.name] for field in fields(kind)})
    except KeyError as error:
        raise ValueError(
            f"{path} has a {line['kind']!r} line without {error}: another version of zeropp may have written "
            "it; use that version to read it"
        ) from None


def _drop_steps_from(path: Path, first_step: int) -> None:
    earlier = [line for line in _lines(path) if line.get("step", 0) < first_step]
    write_file(path, "".join(json.dumps(line) + "\n" for line in earlier))
