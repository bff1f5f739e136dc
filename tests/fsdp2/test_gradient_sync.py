"""FSDP2's own switch for accumulation, which every `no_sync` turns."""

from __future__ import annotations

from typing import Any, cast

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

import zeropp
from tests.configs import CONFIGS
from tests.ranks import Ranks
from tests.training import Trainer


def _accumulate(config: zeropp.Config, follow: bool, explicit: bool) -> tuple[list[float], list[int], int]:
    """Losses of steps of three micro-batches, bytes of gradients across nodes and inside, and how often FSDP2
    held gradients that nobody had reduced."""
    trainer = Trainer(config)
    zpp, net = trainer.zpp, cast(Any, trainer.net)
    assert zpp is not None
    if follow:
        zpp.follow_no_sync()
        zpp.follow_no_sync()  # again is harmless
    losses, held = [], 0
    for _ in range(2):
        for micro_batch in range(3):
            is_last = micro_batch == 2
            if explicit:
                zpp.set_requires_cross_node_sync(is_last)
            else:
                net.set_requires_gradient_sync(is_last)
            losses.append(trainer.backward())
            held += any(comms.unit.holds_gradients for comms in zpp.unit_comms)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    sent = [zpp.ledger.total(collective="reduce_scatter", hop=hop).calls for hop in ("across", "in-node")]
    zpp.remove()
    assert "set_requires_gradient_sync" not in vars(net)
    return losses, sent, held


def test_no_sync_becomes_accumulation_inside_the_node(ranks: Ranks) -> None:
    followed = ranks.run(_accumulate, CONFIGS["default"], True, False)
    explicit = ranks.run(_accumulate, CONFIGS["default"], False, True)
    own = ranks.run(_accumulate, CONFIGS["default"], False, False)
    assert followed == explicit
    for (_, (across, in_node), held), (_, (_, own_in_node), own_held) in zip(followed, own, strict=True):
        assert in_node == 3 * across
        assert own_in_node == across
        assert held == 0
        assert own_held == 4  # every micro-batch without sync


def test_on_a_flat_route_it_stays_fsdp2s(ranks: Ranks) -> None:
    followed = ranks.run(_accumulate, zeropp.Config.off(), True, False)
    assert followed == ranks.run(_accumulate, zeropp.Config.off(), False, False)
    assert all(held == 4 for _, _, held in followed)


def _part(recurse: bool) -> list[bool]:
    trainer = Trainer(CONFIGS["default"])
    zpp, net = trainer.zpp, cast(Any, trainer.net)
    assert zpp is not None
    zpp.follow_no_sync()
    net.set_requires_gradient_sync(False, recurse=recurse)
    return [comms.requires_sync for comms in zpp.unit_comms]


def test_it_is_for_the_modules_it_was_called_on(ranks: Ranks) -> None:
    assert ranks.run(_part, True)[0].count(True) == 0
    assert ranks.run(_part, False)[0].count(False) == 1


def _removed() -> str:
    trainer = Trainer(CONFIGS["default"])
    assert trainer.zpp is not None
    trainer.zpp.remove()
    with pytest.raises(RuntimeError, match="after remove") as error:
        trainer.zpp.follow_no_sync()
    return str(error.value)


def test_after_remove_it_is_an_error(ranks: Ranks) -> None:
    assert all("zeropp.apply" in message for message in ranks.run(_removed))


def _grouped() -> list[bool]:
    """A unit of two modules, of which the second is told."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard([net[0], net[1]])
    fully_shard(net)
    zpp = zeropp.apply(net, CONFIGS["default"])
    zpp.follow_no_sync()
    cast(Any, net[1]).set_requires_gradient_sync(False, recurse=False)
    return [comms.requires_sync for comms in zpp.unit_comms]


def test_any_module_of_a_unit_speaks_for_it(ranks: Ranks) -> None:
    assert ranks.run(_grouped)[0] == [True, False]


def _off_before() -> tuple[list[bool], bool, bool]:
    """FSDP2's switch is off when zeropp starts to follow it."""
    trainer = Trainer(CONFIGS["default"])
    zpp, net = trainer.zpp, cast(Any, trainer.net)
    assert zpp is not None
    net.set_requires_gradient_sync(False)
    zpp.follow_no_sync()
    trainer.backward()
    waits = [comms.has_pending for comms in zpp.unit_comms]
    held = any(comms.unit.holds_gradients for comms in zpp.unit_comms)
    net.set_requires_gradient_sync(True)
    trainer.backward()
    return waits, held, all(p.grad is not None for p in trainer.net.parameters())


def test_a_switch_that_is_off_already_is_followed(ranks: Ranks) -> None:
    assert ranks.run(_off_before) == [([True] * 3, False, True)] * 4
