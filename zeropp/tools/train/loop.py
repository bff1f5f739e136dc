"""The loop around the steps: resume, train, evaluate, save, stop."""

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
from .config import Run
from .peak_flops import peak_flops
from .run_events import Evaluation, Listener, RunInfo, StepRecord, Summary
from .stop import StopRequest
from .trainer import DivergedError, Trainer
from .world import World

STATE_KEYS = ("step", "run", "data", "ranks")
"""What `_save` writes beside tensors."""
MUST_MATCH = ("model", "data", "seed")
"""Parts of the configuration that must be the same when a run resumes; others may change, which is noted."""


class ResumeError(ValueError):
    """The checkpoint and the configuration do not belong together."""


def train(run: Run, world: World, listeners: Sequence[Listener] = ()) -> Summary:
    """Train to `run.steps`, or to a signal. Call it on every rank; the first one's listeners are told."""
    told = listeners if world.is_first else ()
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        for listener in told:
            stack.callback(listener.close)
        return _Loop(run, world, told, stop).train()


class _Loop:
    def __init__(self, run: Run, world: World, listeners: Sequence[Listener], stop: StopRequest) -> None:
        self.run, self.world, self.listeners, self.stop = run, world, listeners, stop
        self.checkpoints = Checkpoints(run.folder / CHECKPOINTS, run.checkpoint.keep, world)
        self.saved_step = 0
        checkpoint = _find_checkpoint(run, self.checkpoints, world)
        with _advice_if_damaged(checkpoint):
            state = None if checkpoint is None else read_state(checkpoint, *STATE_KEYS)
            notes = [] if state is None else _check_same_run(state["run"], _plain(run))
            self.memory = PeakMemory(world.device)
            self.trainer = Trainer(run, world)
            if checkpoint is not None and state is not None:
                notes += self._load(checkpoint, state)
        self.search = self.trainer.zpp.search
        self.has_chosen = self.search is None or self.search.chosen is not None
        if self.search is not None:
            notes.append(self.search.describe())
        self.first_step = self.trainer.steps_done + 1
        self.peak_flops, note = peak_flops(run.logging.peak_tflops, world.device)
        if self.is_done:  # the record of the run stays what it is
            self._tell("on_note", _nothing_to_do(run, self.trainer.steps_done))
            return
        if checkpoint is not None:
            notes = [f"goes on after step {self.saved_step} from {checkpoint}", *notes]
            notes += self._keep_branch(checkpoint)
        self._tell("on_start", self._info())
        for text in [*notes, note]:
            self._tell("on_note", text)

    @property
    def is_done(self) -> bool:
        return self.trainer.steps_done >= self.run.steps

    def train(self) -> Summary:
        if self.is_done:
            return self._summary()
        try:
            is_stopped = self._train_and_save()
        except DivergedError:
            self.checkpoints.wait()  # on every rank alike; what is being written is the last good one
            raise
        self.checkpoints.wait()
        if is_stopped:
            name = self.stop.received.name if self.stop.received is not None else "a signal to another rank"
            self._tell("on_note", f"stopped by {name} after step {self.trainer.steps_done}, which is saved")
        summary = self._summary()
        self._tell("on_end", summary)
        return summary

    def _train_and_save(self) -> bool:
        """Up to the last step, or to a signal: then True."""
        is_stopped = False
        while not self.is_done and not is_stopped:
            is_first = self.trainer.steps_done == self.first_step - 1
            is_stopped = self._step()
            if is_first:
                self.memory.restart()  # it compiled kernels, and took memory for that
            step, is_last = self.trainer.steps_done, self.is_done
            if is_last or _is_due(step, self.run.evaluation.every):
                self._evaluate()
            if is_last or is_stopped or _is_due(step, self.run.checkpoint.every):
                self._save()
            self.checkpoints.poll()
        return is_stopped

    def _step(self) -> bool:
        """Whether all ranks know that the run shall stop."""
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
        self._tell("on_step", record)
        if self.search is not None and self.search.chosen is not None and not self.has_chosen:
            self.has_chosen = True
            self._tell("on_note", self.search.describe())
        return result.stop_requested

    def _evaluate(self) -> None:
        self._tell("on_evaluation", Evaluation(self.trainer.steps_done, self.trainer.evaluate()))

    def _save(self) -> None:
        state = {
            "run": _plain(self.run),
            "data": self.trainer.data.state_dict(),
            "ranks": self.world.size,
        }
        kept = self.trainer.zpp.state_dict() if self.trainer.zpp.has_history else None
        self.checkpoints.save(self.trainer.steps_done, self.trainer.tensors(), state, kept)
        self.saved_step = self.trainer.steps_done

    def _load(self, checkpoint: Path, state: dict[str, Any]) -> list[str]:
        """Returns what a user should know."""
        tensors = self.trainer.tensors()
        self.checkpoints.load(checkpoint, tensors)
        self.trainer.load_tensors(tensors)
        self.trainer.data.load_state_dict(state["data"])
        self.trainer.steps_done = self.saved_step = state["step"]
        if not self.trainer.zpp.has_history:
            return []
        # The same on every rank: what zeropp keeps belongs to ranks, so it is of use to as many as saved it.
        kept = self.checkpoints.load_kept(checkpoint) if state["ranks"] == self.world.size else None
        if self.trainer.zpp.load_state_dict(kept):
            return []
        return ["no state of zeropp for these ranks: weights are sent anew, and kept errors start at zero"]

    def _keep_branch(self, checkpoint: Path) -> list[str]:
        """See branch.py. Returns what a user should know, on the first rank."""
        notes = []

        def keep() -> None:
            if branch := keep_branch(self.run.folder, checkpoint, self.saved_step):
                notes.append(f"what was there beyond that step is kept in {branch}")

        self.world.first_does(keep)
        return notes

    def _info(self) -> RunInfo:
        return RunInfo(
            config=_plain(self.run),
            parameters=self.trainer.parameters,
            ranks=self.world.size,
            nodes=self.trainer.zpp.nodes,
            device=_device_name(self.world.device),
            versions={"zeropp": __version__, "torch": str(torch.__version__)},
            first_step=self.first_step,
        )

    def _summary(self) -> Summary:
        peak, kept = self.world.max(self.memory.bytes, self.trainer.zpp.communication_bytes)
        return Summary(
            step=self.trainer.steps_done,
            is_complete=self.is_done,
            peak_bytes=round(peak),
            communication_bytes=round(kept),
            checkpoint=str(self.checkpoints.path_of(self.saved_step)),
        )

    def _tell(self, method: str, what: object) -> None:
        for listener in self.listeners:
            getattr(listener, method)(what)


def _find_checkpoint(run: Run, checkpoints: Checkpoints, world: World) -> Path | None:
    if run.resume == "auto":
        return checkpoints.last()
    if run.resume == "never":
        if world.from_first(len(steps_in(checkpoints.folder))):
            raise ResumeError(
                f"{run.folder} has checkpoints and resume is 'never'; go on from them with --resume auto, or "
                "choose another --folder"
            )
        return None
    if not Path(run.resume).is_dir():
        raise ResumeError(f"resume is {run.resume!r}; expected 'auto', 'never' or the folder of a checkpoint")
    return Path(run.resume)


@contextmanager
def _advice_if_damaged(checkpoint: Path | None) -> Iterator[None]:
    """Adds what to do to an error of reading the checkpoint."""
    try:
        yield
    except CheckpointError as error:
        assert checkpoint is not None
        step = step_of(checkpoint.name)
        older = [found for found in steps_in(checkpoint.parent) if step is not None and found < step]
        advice = "Expected --resume auto, never, or the folder of a checkpoint; another --folder starts anew"
        if older:
            path = checkpoint.with_name(name_of(max(older)))
            advice = f"The one before it was written whole; to go on from that: --resume {path}"
        raise CheckpointError(f"{error}. {advice}") from error


def _nothing_to_do(run: Run, step: int) -> str:
    return f"nothing to do: step {step} of {run.steps} is done already; --steps with more goes on from there"


def _check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What changed, in words; an error if it may not change."""
    saved_values, values = _flatten(saved), _flatten(now)
    changed = {
        key: f"{key} was {saved_values.get(key)!r} and is {value!r}"
        for key, value in values.items()
        if saved_values.get(key) != value and key not in ("folder", "resume")
    }
    if wrong := [text for key, text in changed.items() if key.split(".")[0] in MUST_MATCH]:
        raise ResumeError(
            f"the checkpoint is of another run: {'; '.join(wrong)}. Use the same values, or another --folder"
        )
    return [f"changed since the checkpoint: {text}" for text in changed.values()]


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= (
            _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        )
    return flat


def _plain(run: Run) -> dict[str, Any]:
    """The configuration as JSON gives it back."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(run), default=str))
    return plain


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
