"""The training loop: resume, train, evaluate, save, stop."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ..peak_memory import PeakMemory
from .branch import keep_branch
from .checkpoint import CHECKPOINTS, CheckpointError, Checkpoints, name_of, read_state, step_of, steps_in
from .config import RunConfig
from .peak_flops import peak_flops
from .run_events import Evaluation, RunInfo, RunListener, StepRecord, Summary
from .stop import StopRequest
from .trainer import DivergedError, Trainer
from .world import World

STATE_KEYS = ("step", "run", "data", "ranks")
"""Keys of a checkpoint's state.json that `_load` needs."""
MUST_MATCH = ("model", "data", "seed")
"""Parts of the configuration that a resumed run may not change. Changes of other parts are logged."""


class ResumeError(ValueError):
    """The checkpoint and the configuration do not match."""


def train(run: RunConfig, world: World, listeners: Sequence[RunListener] = ()) -> Summary:
    """Train until `run.steps` or a signal. Every rank calls this; only the first rank calls its listeners."""
    called = listeners if world.is_first else ()
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        for listener in called:
            stack.callback(listener.close)
        return _Loop(run, world, called, stop).train()


class _Loop:
    def __init__(
        self, run: RunConfig, world: World, listeners: Sequence[RunListener], stop: StopRequest
    ) -> None:
        self.run, self.world, self.listeners, self.stop = run, world, listeners, stop
        self.checkpoints = Checkpoints(run.folder / CHECKPOINTS, run.checkpoint.keep, world)
        self.saved_step = 0
        checkpoint = _find_checkpoint(run, self.checkpoints, world)
        with _advice_if_damaged(checkpoint):
            state = None if checkpoint is None else read_state(checkpoint, *STATE_KEYS)
            notes = [] if state is None else _check_same_run(state["run"], _as_json(run))
            self.memory = PeakMemory(world.device)
            self.trainer = Trainer(run, world)
            if checkpoint is not None and state is not None:
                notes += self._load(checkpoint, state)
        self.search = self.trainer.zpp.search
        self.has_logged_choice = self.search is None or self.search.chosen is not None
        if self.search is not None:
            notes.append(self.search.describe())
        self.first_step = self.trainer.steps_done + 1
        self.peak_flops, note = peak_flops(run.logging.peak_tflops, world.device)
        if self.is_done:  # no on_start: it would remove the end of the complete run from metrics.jsonl
            self._notify("on_note", _nothing_to_do(run, self.trainer.steps_done))
            return
        if checkpoint is not None:
            notes = [f"resumes after step {self.saved_step} from {checkpoint}", *notes]
            notes += self._keep_branch(checkpoint)
        self._notify("on_start", self._info())
        for text in [*notes, note]:
            self._notify("on_note", text)

    @property
    def is_done(self) -> bool:
        return self.trainer.steps_done >= self.run.steps

    def train(self) -> Summary:
        if self.is_done:
            return self._summary()
        try:
            is_stopped = self._train_and_save()
        except DivergedError:
            self.checkpoints.wait()  # all ranks raise in the same step; the current checkpoint is still good
            raise
        self.checkpoints.wait()
        if is_stopped:
            name = self.stop.received.name if self.stop.received is not None else "a signal to another rank"
            self._notify("on_note", f"stopped by {name} after step {self.trainer.steps_done}, which is saved")
        summary = self._summary()
        self._notify("on_end", summary)
        return summary

    def _train_and_save(self) -> bool:
        """Train until the last step or a signal. Return True if a signal has stopped the run."""
        is_stopped = False
        while not self.is_done and not is_stopped:
            is_first = self.trainer.steps_done == self.first_step - 1
            is_stopped = self._step()
            if is_first:
                self.memory.restart()  # the first step compiles kernels, whose memory is not training's
            step, is_last = self.trainer.steps_done, self.is_done
            if is_last or _is_due(step, self.run.evaluation.every):
                self._evaluate()
            if is_last or is_stopped or _is_due(step, self.run.checkpoint.every):
                self._save()
            self.checkpoints.poll()
        return is_stopped

    def _step(self) -> bool:
        """Take a step. Return True, on all ranks, if one of them has received a signal to stop."""
        result = self.trainer.step(stop_requested=self.stop.received is not None)
        tokens, used = self.trainer.tokens_per_step, None
        if self.peak_flops is not None:
            flops = tokens * self.trainer.flops_per_token / result.seconds
            used = flops / (self.peak_flops * self.world.size)
        record = StepRecord(
            self.trainer.steps_done,
            result.loss,
            result.grad_norm,
            result.learning_rate,
            result.seconds,
            tokens,
            result.wire_bytes,
            result.across_bytes,
            used,
        )
        self._notify("on_step", record)
        if self.search is not None and self.search.chosen is not None and not self.has_logged_choice:
            self.has_logged_choice = True
            self._notify("on_note", self.search.describe())
        return result.stop_requested

    def _evaluate(self) -> None:
        self._notify("on_evaluation", Evaluation(self.trainer.steps_done, self.trainer.evaluate()))

    def _save(self) -> None:
        state = {
            "run": _as_json(self.run),
            "data": self.trainer.data.state_dict(),
            "ranks": self.world.size,
        }
        zeropp_state = self.trainer.zpp.state_dict() if self.trainer.zpp.has_history else None
        self.checkpoints.save(self.trainer.steps_done, self.trainer.tensors(), state, zeropp_state)
        self.saved_step = self.trainer.steps_done

    def _load(self, checkpoint: Path, state: dict[str, Any]) -> list[str]:
        """Load a checkpoint. Return notes for the user."""
        tensors = self.trainer.tensors()
        self.checkpoints.load(checkpoint, tensors)
        self.trainer.load_tensors(tensors)
        self.trainer.data.load_state_dict(state["data"])
        self.trainer.steps_done = self.saved_step = state["step"]
        if not self.trainer.zpp.has_history:
            return []
        # zeropp's state belongs to its rank, so another number of ranks cannot use it. The condition is the
        # same on every rank, so all ranks load a state or none does.
        is_usable = state["ranks"] == self.world.size
        zeropp_state = self.checkpoints.load_zeropp_state(checkpoint) if is_usable else None
        if self.trainer.zpp.load_state_dict(zeropp_state):
            return []
        return ["no zeropp state for these ranks: weights are sent again, and error feedback starts at zero"]

    def _keep_branch(self, checkpoint: Path) -> list[str]:
        """See branch.py. Return notes for the user, on the first rank."""
        notes = []

        def keep() -> None:
            if branch := keep_branch(self.run.folder, checkpoint, self.saved_step):
                notes.append(f"later steps of the earlier run are now in {branch}")

        self.world.run_on_first(keep)
        return notes

    def _info(self) -> RunInfo:
        return RunInfo(
            config=_as_json(self.run),
            parameters=self.trainer.parameters,
            ranks=self.world.size,
            nodes=self.trainer.zpp.nodes,
            device=_device_name(self.world.device),
            versions={"zeropp": __version__, "torch": str(torch.__version__)},
            first_step=self.first_step,
        )

    def _summary(self) -> Summary:
        peak, communication = self.world.max(self.memory.bytes, self.trainer.zpp.communication_bytes)
        return Summary(
            step=self.trainer.steps_done,
            is_complete=self.is_done,
            peak_bytes=round(peak),
            communication_bytes=round(communication),
            checkpoint=str(self.checkpoints.path_of(self.saved_step)),
        )

    def _notify(self, method: str, event: object) -> None:
        for listener in self.listeners:
            getattr(listener, method)(event)


def _find_checkpoint(run: RunConfig, checkpoints: Checkpoints, world: World) -> Path | None:
    if run.resume == "auto":
        return checkpoints.last()
    if run.resume == "never":
        if world.broadcast_from_first(len(steps_in(checkpoints.folder))):
            raise ResumeError(
                f"{run.folder} has checkpoints and resume is 'never'; resume from them with --resume auto, "
                "or choose another --folder"
            )
        return None
    if not Path(run.resume).is_dir():
        raise ResumeError(f"resume is {run.resume!r}; expected 'auto', 'never' or the folder of a checkpoint")
    return Path(run.resume)


@contextmanager
def _advice_if_damaged(checkpoint: Path | None) -> Iterator[None]:
    """Append advice to an error in reading the checkpoint."""
    try:
        yield
    except CheckpointError as error:
        assert checkpoint is not None
        step = step_of(checkpoint.name)
        older = [found for found in steps_in(checkpoint.parent) if step is not None and found < step]
        advice = (
            "Expected --resume auto, never, or the folder of a checkpoint; another --folder starts a new run"
        )
        if older:
            path = checkpoint.with_name(name_of(max(older)))
            advice = f"The checkpoint before it is complete; to resume from it: --resume {path}"
        raise CheckpointError(f"{error}. {advice}") from error


def _nothing_to_do(run: RunConfig, step: int) -> str:
    return f"nothing to do: step {step} of {run.steps} is done already; a larger --steps continues the run"


def _check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each changed value. Raise if one may not change."""
    saved_values, values = _flatten(saved), _flatten(now)
    changed = {
        key: f"{key} was {saved_values.get(key)!r} and is {value!r}"
        for key, value in values.items()
        if saved_values.get(key) != value and key not in ("folder", "resume")
    }
    if wrong := [text for key, text in changed.items() if key.split(".")[0] in MUST_MATCH]:
        raise ResumeError(
            f"the checkpoint is from another run: {'; '.join(wrong)}. Use the same values or another --folder"
        )
    return [f"changed since the checkpoint: {text}" for text in changed.values()]


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= (
            _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        )
    return flat


def _as_json(run: RunConfig) -> dict[str, Any]:
    """Return the configuration with JSON's types, to compare it with that of a checkpoint."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(run), default=str))
    return values


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
