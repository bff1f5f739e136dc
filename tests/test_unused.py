"""Parameters without a gradient: they have one, zero, only in steps in which zeropp needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import zeropp
from tests.configs import CONFIGS
from tests.ranks import Ranks
from tests.training import Net, Trainer, local

FEEDBACK, DEFAULT = CONFIGS["feedback"], CONFIGS["default"]


def make_net_with_spare() -> Net:
    """One parameter of a block is never used."""
    torch.manual_seed(0)
    net = Net()
    net.blocks[0].spare = nn.Parameter(torch.ones(8, 4))
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    return net


def removed(trainer: Trainer, zpp: zeropp.ZeroPP) -> None:
    zpp.remove()


def replaced(trainer: Trainer, zpp: zeropp.ZeroPP) -> None:
    zeropp.apply(trainer.net, DEFAULT)


def replaced_twice_and_removed(trainer: Trainer, zpp: zeropp.ZeroPP) -> None:
    zeropp.apply(trainer.net, CONFIGS["four_bit"])  # needs it, too
    zeropp.apply(trainer.net, FEEDBACK).remove()


def set_to_none(trainer: Trainer, zpp: zeropp.ZeroPP) -> None:
    zpp.set_config(DEFAULT)


def set_and_removed(trainer: Trainer, zpp: zeropp.ZeroPP) -> None:
    zpp.set_config(CONFIGS["four_bit"])
    zpp.remove()


CHANGES = (removed, replaced, replaced_twice_and_removed, set_to_none, set_and_removed)


def _spare(change: Callable[[Trainer, zeropp.ZeroPP], None], set_by_user: bool) -> list[Any]:
    net = make_net_with_spare()
    cast(FSDPModule, net).set_reduce_scatter_unused_params(set_by_user)
    trainer = Trainer(FEEDBACK, net=net)
    assert trainer.zpp is not None
    spare = net.blocks[0].get_parameter("spare")
    trainer.step()
    seen = [spare.grad is None]
    change(trainer, trainer.zpp)
    before = local(spare).clone()
    trainer.step()
    return [*seen, spare.grad is None, torch.equal(local(spare), before)]


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_user_had_set_comes_back(ranks: Ranks, change: Any) -> None:
    """Else AdamW would go on and decay what nobody uses."""
    assert ranks.run(_spare, change, False) == [[False, True, True]] * 4


def test_what_the_user_had_switched_on_stays_on(ranks: Ranks) -> None:
    assert ranks.run(_spare, replaced_twice_and_removed, True) == [[False, False, False]] * 4


def _after_accumulation(disturb: str) -> list[bool]:
    """Whether an unused parameter has no gradient, in a step that accumulates and in the next one."""
    net = make_net_with_spare()
    trainer = Trainer(DEFAULT, net=net, micro_batches=2, accumulate_in_node=True)
    zpp = trainer.zpp
    assert zpp is not None
    spare = net.blocks[0].get_parameter("spare")
    trainer.step()
    seen = [spare.grad is None]
    trainer.optimizer.zero_grad()
    if disturb == "resume":
        state = zpp.state_dict()
        zpp.remove()
        zeropp.apply(net, DEFAULT).load_state_dict(state)
    elif disturb == "set_config":
        zpp.set_config(CONFIGS["paper"])
    trainer.micro_batches, trainer.accumulate_in_node = 1, False
    trainer.step()
    return [*seen, spare.grad is None]


@pytest.mark.parametrize("disturb", ["nothing", "resume", "set_config"])
def test_a_step_without_accumulation_does_not_know_of_those_before(ranks: Ranks, disturb: str) -> None:
    assert ranks.run(_after_accumulation, disturb) == [[False, True]] * 4
