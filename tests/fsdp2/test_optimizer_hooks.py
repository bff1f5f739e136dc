"""Optimizer steps of every kind: with a closure, in backward, of several optimizers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Literal, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

import zeropp
from tests.ranks import Ranks
from tests.training import Trainer, local
from zeropp.comm import Alarm
from zeropp.fsdp2.optimizer_hooks import OptimizerSteps, watching

ON_2X2 = zeropp.Config(node_size=2)
How = Literal["no closure", "by position", "by keyword"]


def _weights(net: nn.Module) -> list[torch.Tensor]:
    return [local(p).detach().clone() for p in net.parameters()]


def _steps_with_closure(how: How) -> list[torch.Tensor]:
    """As in Lightning's automatic optimization: the last micro-batch is inside the closure."""
    trainer = Trainer(ON_2X2)
    zpp = trainer.zpp
    assert zpp is not None

    def last_micro_batch() -> float:
        zpp.set_requires_cross_node_sync(True)
        return trainer.backward()

    step: Any = trainer.optimizer.step
    for _ in range(3):
        trainer.optimizer.zero_grad()
        zpp.set_requires_cross_node_sync(False)
        trainer.backward()
        if how == "no closure":
            last_micro_batch()
            step()
        elif how == "by position":
            assert isinstance(step(last_micro_batch), float)
        else:
            assert isinstance(step(closure=last_micro_batch), float)
    return _weights(trainer.net)


def test_the_last_micro_batch_may_be_in_a_closure(ranks: Ranks) -> None:
    plain = ranks.run(_steps_with_closure, "no closure")
    for how in ("by position", "by keyword"):
        for ours, expected in zip(ranks.run(_steps_with_closure, how), plain, strict=True):
            assert all(map(torch.equal, ours, expected))


def _forgotten_in_closure() -> tuple[str, bool]:
    trainer = Trainer(ON_2X2)
    zpp = trainer.zpp
    assert zpp is not None
    trainer.step()
    zpp.set_requires_cross_node_sync(False)
    before = _weights(trainer.net)
    step: Any = trainer.optimizer.step
    try:
        step(trainer.backward)
    except RuntimeError as error:
        return str(error), all(map(torch.equal, before, _weights(trainer.net)))
    return "", False


def test_a_sync_forgotten_in_a_closure_raises_before_the_weights_change(ranks: Ranks) -> None:
    for error, unchanged in ranks.run(_forgotten_in_closure):
        assert "set_requires_cross_node_sync(True) before the backward" in error
        assert unchanged


class _Twice(torch.optim.Optimizer):
    """Calls the closure again at other weights, which it has changed in a way that nothing else notices."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> list[float]:  # type: ignore[override]
        losses = [closure()]
        with torch.no_grad():
            torch._foreach_mul_(self.param_groups[0]["params"], 0.5)
        return [*losses, closure()]


def _even_net() -> nn.Module:
    """LBFGS flattens DTensors, which needs shards of one size."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
    fully_shard(net[0])
    fully_shard(net[2])
    fully_shard(net)
    return net


def _losses_of(make: Callable[[Any], Any], secondary: bool) -> list[float]:
    net = _even_net()
    zpp = zeropp.apply(net, zeropp.Config(node_size=2, secondary=secondary, gradients_across="int8"))
    optimizer, x = make(net.parameters()), torch.linspace(-1, 1, 24).view(3, 8)
    losses: list[float] = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = (net(x) - 1).square().mean()  # the same on every rank, so that all search alike
        loss.backward()
        losses.append(loss.item())
        return losses[-1]

    for _ in range(2):
        optimizer.step(closure)
    zpp.summary()
    return losses


def _lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.5, max_iter=4)


@pytest.mark.parametrize("make", [_Twice, _lbfgs])
def test_each_call_of_a_closure_sees_the_weights_of_its_time(ranks: Ranks, make: Any) -> None:
    kept, not_kept = (ranks.run(_losses_of, make, secondary) for secondary in (True, False))
    assert kept == not_kept
    assert len(set(kept[0])) >= 3


def _in_backward(secondary: bool) -> list[float]:
    """One optimizer for each parameter, which steps as soon as its gradient is there."""
    trainer = Trainer(zeropp.Config(node_size=2, secondary=secondary))
    optimizers = {p: torch.optim.SGD([p], lr=0.1, foreach=True) for p in trainer.net.parameters()}

    def step(p: Any) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    p: Any
    for p in optimizers:
        p.register_post_accumulate_grad_hook(step)
    return [trainer.backward() for _ in range(4)]


def test_optimizers_in_backward(ranks: Ranks) -> None:
    kept, not_kept = ranks.run(_in_backward, True), ranks.run(_in_backward, False)
    assert kept == not_kept
    assert len(set(kept[0])) == 4


def _assigned(secondary: bool) -> float:
    """load_state_dict(assign=True) puts other parameters in place, with an optimizer of their own."""
    trainer = Trainer(zeropp.Config(node_size=2, secondary=secondary))
    trainer.step()
    state = {name: tensor.clone() for name, tensor in trainer.net.state_dict().items()}
    trainer.net.load_state_dict(state, assign=True)
    trainer.optimizer = torch.optim.SGD(trainer.net.parameters(), lr=0.1, foreach=True)
    trainer.evaluate()
    trainer.step()
    return trainer.evaluate()


def test_parameters_that_were_replaced_are_known(ranks: Ranks) -> None:
    assert ranks.run(_assigned, True) == ranks.run(_assigned, False)


def _other_models() -> list[int]:
    """Gathers across nodes after steps of: nobody, another model's optimizer, the own one."""
    trainer = Trainer(ON_2X2)
    other = nn.Linear(2, 2)
    assert trainer.zpp is not None
    counts = []

    def evaluate() -> None:
        before, net = _gathers_across(trainer.zpp), cast(FSDPModule, trainer.net)
        net.reshard()  # after an evaluation the root is still gathered
        trainer.evaluate()
        counts.append(_gathers_across(trainer.zpp) - before)

    trainer.backward()
    evaluate()
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    evaluate()
    trainer.optimizer.step()
    evaluate()
    return counts


def _gathers_across(zpp: Any) -> int:
    return sum(
        t.calls for key, t in zpp.ledger.rows() if (key.collective, key.hop) == ("all_gather", "across")
    )


def test_only_steps_of_the_own_parameters_count(ranks: Ranks) -> None:
    assert ranks.run(_other_models) == [[0, 0, 3]] * 4


def test_a_model_that_goes_in_the_middle_of_a_step_of_another_one() -> None:
    """Garbage is collected whenever Python likes, also while torch runs its hooks."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    optimizer.step()  # imports a lot
    gc.collect()  # owners that earlier tests have left
    left = watching()  # those that somebody has frozen
    gc.disable()
    steps = OptimizerSteps([], Alarm())
    handles = steps.register()
    assert len(watching()) == len(left) + 1
    cycle: list[Any] = [steps]
    cycle.append(cycle)
    del steps, cycle
    collect = register_optimizer_step_pre_hook(lambda *_: (gc.collect(), None)[1])
    later = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        optimizer.step()
    finally:
        collect.remove()
        later.remove()
        gc.enable()
    assert len(watching()) == len(left)
    for handle in handles:
        handle.remove()  # of what is gone
