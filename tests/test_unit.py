"""One switch for cross-node sync, whatever the route and the mesh: what the loop sees is the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import zeropp
from tests.configs import CONFIGS
from tests.ranks import Ranks
from tests.training import Net, Trainer, batches, loss_of, make_net

MICRO_BATCHES = 3
FLAT = zeropp.Config.off(node_size=2)
WIRE16 = zeropp.Config.wire16(node_size=2)
TWO_HOP = zeropp.Config(node_size=2)
ROUTES: dict[str, tuple[zeropp.Config, tuple[int, int] | None]] = {
    "flat": (FLAT, None),
    "flat, 16 bits": (WIRE16, None),
    "two hops": (TWO_HOP, None),
    "HSDP": (FLAT, (2, 2)),
    "HSDP, two hops": (TWO_HOP, (2, 2)),
    "HSDP, a rank a node": (FLAT, (4, 1)),
    "HSDP over nodes, flat": (zeropp.Config.wire16(node_size=1), (2, 2)),
    "HSDP over nodes, two hops": (zeropp.Config(node_size=1), (2, 2)),
}
"""By name: a Config, and replicas and ranks of a shard group, or one shard group."""


def make(mesh: tuple[int, int] | None) -> Net:
    if mesh is None:
        return make_net()
    return make_net(mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")))


def prepare(name: str) -> tuple[Trainer, zeropp.ZeroPP]:
    config, mesh = ROUTES[name]
    trainer = Trainer(config, net=make(mesh))
    assert trainer.zpp is not None
    return trainer, trainer.zpp


def train(trainer: Trainer, set_sync: Callable[[bool], None], steps: int = 2) -> list[float]:
    losses = []
    for _ in range(steps):
        for micro_batch in range(MICRO_BATCHES):
            set_sync(micro_batch == MICRO_BATCHES - 1)
            losses.append(trainer.backward())
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    return losses


def gradients(trainer: Trainer) -> list[Tensor]:
    return list(trainer.local_gradients().values())


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    assert any(gradient.any() for gradient in theirs)
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _as_by_hand(name: str) -> tuple[list[float], list[float], list[dict[str, int]]]:
    """With one call, and with the branches that a loop had without it."""
    losses, sent = [], []
    for by_hand in (False, True):
        trainer, zpp = prepare(name)
        set_sync: Callable[[bool], None] = zpp.set_requires_cross_node_sync
        root = cast(FSDPModule, trainer.net)
        if by_hand and name.startswith("HSDP"):
            set_sync = root.set_requires_all_reduce
        elif by_hand and name.startswith("flat"):
            set_sync = root.set_requires_gradient_sync
        losses.append(train(trainer, set_sync))
        sent.append({key.hop: traffic.wire_bytes for key, traffic in zpp.ledger.rows()})
    return losses[0], losses[1], sent


@pytest.mark.parametrize("name", [name for name in ROUTES if "over nodes" not in name])
def test_losses_and_bytes_are_those_of_the_right_switch(ranks: Ranks, name: str) -> None:
    for ours, by_hand, sent in ranks.run(_as_by_hand, name):
        assert ours == by_hand
        assert sent[0] == sent[1]


def _reductions(name: str) -> tuple[int, int, int]:
    """In a step of three micro-batches, of one unit: across nodes, in all, and all-reduces of replicas."""
    trainer, zpp = prepare(name)
    all_reduces: list[int] = []
    unit = zpp.unit_comms[1].unit
    if unit.is_hsdp:  # FSDP2 would call the hook without replicas, too
        unit.on_all_reduce(lambda gradients: all_reduces.append(gradients.numel()))
    train(trainer, zpp.set_requires_cross_node_sync, steps=1)
    counted = [
        traffic
        for key, traffic in zpp.ledger.rows()
        if (key.unit, key.collective) == (unit.name, "reduce_scatter")
    ]
    across = sum(traffic.calls for traffic in counted if traffic.across_bytes)
    return across, sum(traffic.calls for traffic in counted), len(all_reduces)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("flat", (1, 1, 0)),
        ("two hops", (1, 4, 0)),
        ("HSDP", (0, 3, 1)),
        ("HSDP, two hops", (0, 3, 1)),
        ("HSDP, a rank a node", (0, 0, 1)),
        ("HSDP over nodes, two hops", (1, 1, 1)),
    ],
)
def test_gradients_cross_nodes_once_per_step(ranks: Ranks, name: str, expected: tuple[int, ...]) -> None:
    assert all(found == expected for found in ranks.run(_reductions, name))


def _forgotten(name: str) -> list[str]:
    """Sync stays off, or is turned on too late."""
    errors = []
    for late in (False, True):
        trainer, zpp = prepare(name)
        zpp.set_requires_cross_node_sync(False)
        trainer.backward()
        if late:
            zpp.set_requires_cross_node_sync(True)
        for call in (trainer.optimizer.step, partial(zpp.set_config, WIRE16), zpp.remove):
            with pytest.raises(RuntimeError) as raised:
                call()
            errors.append(str(raised.value))
    return errors


@pytest.mark.parametrize("name", [name for name in ROUTES if "a rank a node" not in name])
def test_a_forgotten_sync_is_an_error(ranks: Ranks, name: str) -> None:
    """(Units that are left alone are FSDP2's, and so are their mistakes.)"""
    for errors in ranks.run(_forgotten, name):
        assert ["not summed over all nodes" in error for error in errors] == [True, False, False] * 2
        assert ["still pending" in error for error in errors] == [False, True, True] * 2


def _flushed(name: str) -> tuple[list[Tensor], list[Tensor]]:
    found = []
    for flush in (True, False):
        trainer, zpp = prepare(name)
        for _ in range(2):  # steps
            zpp.set_requires_cross_node_sync(False)
            trainer.backward()
            trainer.backward()
            if flush:
                zpp.flush()
                zpp.flush()  # has nothing to do
            else:
                zpp.set_requires_cross_node_sync(True)
                (0.0 * loss_of(trainer.net, next(batches(3)))).backward()  # type: ignore[no-untyped-call]
            seen = gradients(trainer)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
        found.append(seen)
    return found[0], found[1]


@pytest.mark.parametrize("name", ROUTES)
def test_flush_sends_what_waits_on_every_route(ranks: Ranks, name: str) -> None:
    for flushed, synced in ranks.run(_flushed, name):
        assert same(flushed, synced)


def _dropped(name: str) -> list[list[Tensor]]:
    """The gradients of a step, if something before it was dropped in one way, in another, and if not."""
    found = []
    for dropped in ("by zero_grad", "by name", None):
        trainer, zpp = prepare(name)
        zpp.set_requires_cross_node_sync(False)
        if dropped is not None:
            trainer.backward()
        if dropped == "by zero_grad":
            trainer.optimizer.zero_grad()
        elif dropped == "by name":
            zpp.drop_pending_gradients()
            trainer.net.zero_grad()
        zpp.set_requires_cross_node_sync(True)
        trainer.data = batches(7)
        trainer.backward()
        found.append(gradients(trainer))
    return found


@pytest.mark.parametrize("name", ROUTES)
def test_what_waits_can_be_dropped_on_every_route(ranks: Ranks, name: str) -> None:
    for by_zero_grad, by_name, plain in ranks.run(_dropped, name):
        assert same(by_zero_grad, plain)
        assert same(by_name, plain)


def _switched() -> list[tuple[str, bool, bool]]:
    """Whether FSDP2 reduces and our hop across is on, after a change of the route while sync is off."""
    found = []
    zpp = prepare("flat")[1]
    zpp.set_requires_cross_node_sync(False)

    def note(what: str) -> None:
        comms = zpp.unit_comms[0]
        syncs = comms.requires_sync or not comms.defers_across
        found.append((what, comms.unit.reduces_gradients, syncs))

    note("flat")
    zpp.set_config(TWO_HOP)
    note("two hops")
    zpp.set_config(FLAT)
    note("flat again")
    zpp.remove()
    note("removed")
    return found


def test_another_route_and_no_route_leave_no_switch_behind(ranks: Ranks) -> None:
    for found in ranks.run(_switched):
        assert found == [
            ("flat", False, True),
            ("two hops", True, False),
            ("flat again", False, True),
            ("removed", True, True),
        ]


def _told(name: str) -> dict[str, Any]:
    zpp = prepare(name)[1]
    history = {}
    for key, config in CONFIGS.items():
        zpp.set_config(config)
        history[key] = zpp.has_history
    zpp.set_config(TWO_HOP, overrides={"blocks.1": zeropp.Config.four_bit(node_size=2)})
    history["one unit"] = zpp.has_history
    return {"nodes": zpp.nodes, "history": history}


def _messages_of_a_gather(chunks: Any) -> list[int]:
    """Calls of the hop across nodes, of a unit with rows of 205,000 elements; with overlap and without."""
    calls = []
    for overlap in (True, False):
        torch.manual_seed(0)
        net = torch.nn.Linear(1024, 800)
        fully_shard(net)
        zpp = zeropp.apply(net, zeropp.Config(node_size=2, chunks=chunks, overlap=overlap))
        net(torch.ones(1, 1024))
        (sent,) = [traffic for key, traffic in zpp.ledger.rows() if key.hop == "across"]
        calls.append(sent.calls)
    return calls


def test_what_is_not_large_stays_whole_on_gloo_unless_asked_for(ranks: Ranks) -> None:
    assert ranks.run(_messages_of_a_gather, "auto") == [[1, 1]] * 4
    assert ranks.run(_messages_of_a_gather, 2) == [[2, 2]] * 4


def test_callers_can_ask_for_nodes_and_history(ranks: Ranks) -> None:
    for name, nodes in (("two hops", 2), ("flat", 2), ("HSDP", 1)):
        for found in ranks.run(_told, name):
            assert found["nodes"] == nodes
            with_history = {key for key, has in found["history"].items() if has}
            assert with_history == {"four_bit", "delta", "stochastic", "feedback", "one unit"}
