"""Complete runs on real ranks: a stopped and resumed run equals an uninterrupted one."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ranks import Ranks
from tests.searches import VISIT, short_visits
from tests.tools.train.runs import small_run, train_here
from zeropp import Config
from zeropp.tools.train.checkpoint import steps_in
from zeropp.tools.train.config import CheckpointConfig, EvaluationConfig, RunConfig
from zeropp.tools.train.loop import ResumeError
from zeropp.tools.train.metrics import FILE_NAME, Metrics
from zeropp.tools.train.run_events import RunListener, StepRecord, Summary


def losses(run: RunConfig) -> list[float]:
    return [record.loss for record in Metrics(run.folder / FILE_NAME).steps]


def validation_losses(run: RunConfig) -> list[float]:
    return [evaluation.validation_loss for evaluation in Metrics(run.folder / FILE_NAME).evaluations]


class SignalAt(RunListener):
    """Sends SIGTERM to this rank during a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, record: StepRecord) -> None:
        if record.step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def train_with_signal(run: RunConfig, step: int) -> Summary:
    return train_here(run, SignalAt(step))


@pytest.mark.parametrize(
    "config",
    [
        Config(node_size=2),
        Config.off(node_size=2),
        Config.paper(node_size=2),
        Config.four_bit(node_size=2, rounding="stochastic"),
    ],
    ids=["default", "off", "paper", "four_bit"],
)
def test_a_run_stopped_by_a_signal_resumes_bit_for_bit(ranks: Ranks, tmp_path: Path, config: Config) -> None:
    often = {"checkpoint": CheckpointConfig(every=2), "evaluation": EvaluationConfig(every=2, batches=2)}
    whole = small_run(tmp_path / "whole", zeropp=config, steps=4, **often)
    parts = replace(whole, folder=tmp_path / "parts")
    ranks.run(train_here, whole)
    parts.folder.mkdir()
    summaries = ranks.run(train_with_signal, parts, 2)
    assert all((summary.step, summary.is_complete) == (3, False) for summary in summaries)
    assert sorted(steps_in(parts.folder / "checkpoints")) == [2, 3]
    assert ranks.run(train_here, parts)[0].is_complete
    assert losses(parts) == losses(whole)
    assert validation_losses(parts) == validation_losses(whole)
    assert len(validation_losses(whole)) == 2  # one of them after the resume
    assert [start.first_step for start in Metrics(parts.folder / FILE_NAME).starts] == [1, 4]


class Notes(RunListener):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_note(self, text: str) -> None:
        self.texts.append(text)


@short_visits
def notes_of(run: RunConfig) -> list[str]:
    notes = Notes()
    train_here(run, notes)
    return [text for text in notes.texts if text.startswith("auto ")]


def test_a_resumed_run_keeps_the_chosen_config(ranks: Ranks, tmp_path: Path) -> None:
    steps = 2 * 3 * VISIT + 2  # one node has three candidates
    run = small_run(tmp_path, zeropp="auto", steps=steps, checkpoint=CheckpointConfig(every=0))
    (begins, chosen), *_ = ranks.run(notes_of, run, world=2)
    assert begins.startswith("auto tries plain FSDP2, ")
    assert chosen.startswith("auto has chosen ")
    assert ranks.run(notes_of, replace(run, steps=steps + 2), world=2)[0] == [chosen]


def test_a_run_resumes_with_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Four ranks, then two with twice the micro-batches: the data is the same, the order of sums is not."""
    config = Config.off(node_size=2)
    whole = small_run(tmp_path / "whole", zeropp=config, steps=4)
    first = replace(whole, folder=tmp_path / "parts")
    ranks.run(train_here, whole)
    first.folder.mkdir()
    ranks.run(train_with_signal, first, 1)
    second = replace(first, batch=replace(first.batch, micro_batches=4))
    ranks.run(train_here, second, world=2)
    assert len(losses(second)) == 4
    assert losses(second) == pytest.approx(losses(whole), rel=1e-4)


def test_a_complete_run_is_not_changed(ranks: Ranks, tmp_path: Path) -> None:
    run = small_run(tmp_path, steps=2)
    ranks.run(train_here, run, world=2)
    before = (run.folder / FILE_NAME).read_text()
    for steps in (2, 1):
        summary = ranks.run(train_here, replace(run, steps=steps), world=2)[0]
        assert (summary.step, summary.is_complete) == (2, True)
        assert (run.folder / FILE_NAME).read_text() == before


def test_a_run_resumes_with_more_steps_from_a_named_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    run = small_run(tmp_path / "first", steps=4)
    ranks.run(train_here, run, world=2)
    checkpoint = run.folder / "checkpoints" / "step-00000004"
    longer = small_run(tmp_path / "second", steps=6, resume=str(checkpoint))
    longer = replace(longer, data=run.data)
    assert ranks.run(train_here, longer, world=2)[0].step == 6
    assert [record.step for record in Metrics(longer.folder / FILE_NAME).steps] == [5, 6]


def refusal(run: RunConfig) -> str:
    with pytest.raises(ResumeError) as error:
        train_here(run)
    return str(error.value)


def test_a_configuration_that_does_not_match_the_checkpoint_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    run = small_run(tmp_path, steps=2)
    ranks.run(train_here, run, world=1)
    for changes, message in (
        (
            {"model": replace(run.model, layers=3)},
            "the checkpoint is from another run: model.layers was 2 and is 3",
        ),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"resume": "never"}, "has checkpoints and resume is 'never'"),
        ({"resume": "yes"}, "resume is 'yes'; expected 'auto', 'never' or the folder of a checkpoint"),
    ):
        assert message in ranks.run(refusal, replace(run, **changes), world=1)[0]
