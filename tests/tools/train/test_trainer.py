"""Training steps on real ranks: bytes, losses, and divergence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.tools.train.runs import small_run
from tests.training import local
from zeropp import Config
from zeropp.tools.train.config import BatchConfig, OptimizerConfig, RunConfig, ScheduleConfig
from zeropp.tools.train.trainer import DivergedError, StepResult, Trainer
from zeropp.tools.train.world import World


def some_steps(run: RunConfig, count: int) -> list[StepResult]:
    trainer = Trainer(run, World.current())
    return [trainer.step() for _ in range(count)]


def test_gradients_cross_nodes_once_per_step(ranks: Ranks, tmp_path: Path) -> None:
    """Half of the int8 weights and int4 gradients go to the other node: 0.75 bytes a parameter, plus
    scales."""
    run = small_run(tmp_path)
    for micro_batches in (1, 3):
        batch = replace(run.batch, micro_batches=micro_batches)
        steps = ranks.run(some_steps, replace(run, batch=batch), 2)
        assert len(set(map(str, steps[0]))) == 2
        per_node = steps[0][1].across_bytes / 2 / parameters(run)
        assert 0.75 < per_node < 0.95  # padding is a visible share of such a small model
        assert steps[0][1].wire_bytes > steps[0][1].across_bytes


def parameters(run: RunConfig) -> int:
    width, gpt = run.model.gpt().width, run.model.gpt()
    block = 4 * width**2 + 3 * width * gpt.hidden + 2 * width
    return gpt.layers * block + 2 * gpt.vocab_size * width + width


def test_plain_fsdp2_accumulates_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    """A flat route gathers in every micro-batch. It reduces gradients once per step, or in every
    micro-batch."""
    run = small_run(tmp_path, zeropp=Config.off(node_size=2))
    once = ranks.run(some_steps, run, 3)[0]
    every = ranks.run(some_steps, replace(run, batch=replace(run.batch, sync="micro-batch")), 3)[0]
    assert every[1].across_bytes > 1.2 * once[1].across_bytes
    assert [step.loss for step in every] == pytest.approx([step.loss for step in once], rel=1e-5)


def test_micro_batches_add_up_to_one_large_batch(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks with two micro-batches of one sequence read the same four sequences as with one micro-batch
    of two, in another order."""
    run = small_run(tmp_path, zeropp=Config.off(node_size=1))
    small = replace(run, batch=BatchConfig(sequence=32, size=1, micro_batches=2))
    large = replace(run, batch=BatchConfig(sequence=32, size=2, micro_batches=1))
    first, second = (ranks.run(some_steps, each, 3, world=2)[0] for each in (small, large))
    assert [s.loss for s in first] == pytest.approx([s.loss for s in second], rel=1e-5)
    assert [s.grad_norm for s in first] == pytest.approx([s.grad_norm for s in second], rel=1e-4)


def clipped_norm(run: RunConfig) -> tuple[float, float]:
    """Return the reported norm and the norm of the gradients in the optimizer's step."""
    trainer = Trainer(run, World.current())
    seen: list[float] = []

    def measure(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        squares = [local(p.grad).square().sum() for p in trainer.model.parameters()]
        seen.append(trainer.world.sum(torch.stack(squares).sum())[0] ** 0.5)

    trainer.optimizer.register_step_pre_hook(measure)
    return trainer.step().grad_norm, seen[0]


@pytest.mark.parametrize("clip_norm", [0.0, 0.25])
def test_clipping(ranks: Ranks, tmp_path: Path, clip_norm: float) -> None:
    run = small_run(tmp_path, optimizer=OptimizerConfig(clip_norm=clip_norm))
    reported, applied = ranks.run(clipped_norm, run)[0]
    assert reported > 1.0
    assert applied == pytest.approx(clip_norm or reported, rel=1e-4)


def evaluate_between_steps(run: RunConfig) -> list[float]:
    trainer = Trainer(run, World.current())
    before = trainer.evaluate()
    losses = [trainer.step().loss for _ in range(10)]
    after, again = trainer.evaluate(), trainer.evaluate()
    assert after == again
    return [before, losses[0], after]


def test_evaluation_sees_the_trained_weights(ranks: Ranks, tmp_path: Path) -> None:
    run = small_run(tmp_path, schedule=ScheduleConfig(warmup_steps=1), steps=10)
    before, first, after = ranks.run(evaluate_between_steps, run)[0]
    assert before == pytest.approx(first, rel=0.05)
    assert after < 0.95 * before


def poison(run: RunConfig) -> tuple[str, bool]:
    """Make a weight of one rank infinite. Return the error, and whether this rank's weights are unchanged."""
    trainer = Trainer(run, World.current())
    trainer.step()
    weight = next(iter(trainer.model.parameters()))
    if trainer.world.rank == 1:
        local(weight.data).fill_(float("inf"))
    trainer.zpp.invalidate()
    before = [local(p).clone() for p in trainer.model.parameters()]
    try:
        trainer.step()
    except DivergedError as error:
        same = all(
            torch.equal(old, local(new)) for old, new in zip(before, trainer.model.parameters(), strict=True)
        )
        return str(error), same
    return "it went on", False


def test_a_loss_that_is_not_finite_stops_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for message, weights_untouched in ranks.run(poison, small_run(tmp_path)):
        assert "of step 2 is nan: the run has diverged" in message
        assert "optimizer.learning_rate (now 0.002)" in message
        assert weights_untouched
