"""Training through FSDP2 on real ranks: what must be equal to the last bit, and how often hops run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import zeropp
from tests.configs import CONFIGS
from tests.ranks import Ranks
from tests.training import OPTIMIZERS, Trainer
from zeropp.comm.profiler_labels import Label, profile_all_threads

ON_2X2 = zeropp.Config(node_size=2)


def _train(
    config: zeropp.Config | None, steps: int, optimizer: str, micro_batches: int, deferred: bool, reload: bool
) -> dict[str, Any]:
    trainer = Trainer(config, optimizer=optimizer, micro_batches=micro_batches, accumulate_in_node=deferred)
    losses = []
    for step in range(steps):
        losses.append(trainer.step())
        losses.append(trainer.evaluate())
        if reload and step == 1:  # in the middle of the run: back to other weights
            shuffled = {name: tensor * 0.5 for name, tensor in trainer.net.state_dict().items()}
            trainer.net.load_state_dict(shuffled)
    return {"losses": losses, "gradients": trainer.local_gradients()}


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_off_is_plain_fsdp2_bit_for_bit(ranks: Ranks, micro_batches: int) -> None:
    plain, off = (
        ranks.run(_train, config, 3, "adamw-fused", micro_batches, False, False)
        for config in (None, zeropp.Config.off())
    )
    for before, after in zip(plain, off, strict=True):
        assert before["losses"] == after["losses"]
        assert all(
            torch.equal(before["gradients"][name], after["gradients"][name]) for name in before["gradients"]
        )


@pytest.mark.parametrize(
    ("optimizer", "micro_batches"), [("adamw-fused", 1), *((optimizer, 2) for optimizer in OPTIMIZERS)]
)
def test_secondary_on_and_off_are_equal_bit_for_bit(ranks: Ranks, optimizer: str, micro_batches: int) -> None:
    """With an evaluation after every step and a checkpoint loaded in the middle."""
    on, off = (
        ranks.run(_train, zeropp.Config(node_size=2, secondary=kept), 3, optimizer, micro_batches, True, True)
        for kept in (True, False)
    )
    assert on[0]["losses"] == off[0]["losses"]
    assert len(set(on[0]["losses"])) > 4  # the run did move


@cache
def _losses(ranks: Ranks, config: zeropp.Config | None, world: int) -> list[float]:
    """Losses of some steps. Plain FSDP2 knows no nodes: all shapes of one world share it."""
    first, *_ = ranks.run(_train, config, 4, "adamw-fused", 2, True, False, world=world)
    losses: list[float] = first["losses"]
    return losses


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (1, 3), (3, 1), (6, 1)])
def test_every_layout_trains_like_plain(ranks: Ranks, shape: tuple[int, int]) -> None:
    nodes, per_node = shape
    ours = [replace(CONFIGS[name], node_size=per_node) for name in ("default", "four_bit")]
    plain, *losses = (_losses(ranks, config, nodes * per_node) for config in (None, *ours))
    for found in losses:
        assert found == pytest.approx(plain, rel=0.02)
        assert found != plain


def _count_collectives(micro_batches: int) -> dict[str, Any]:
    trainer = Trainer(ON_2X2, micro_batches=micro_batches, accumulate_in_node=True)
    trainer.step()  # FSDP2 sets itself up in the first step
    assert trainer.zpp is not None
    ledger = trainer.zpp.ledger
    ledger.reset()
    with profile_all_threads() as prof:
        trainer.step()
    events = {event.key: event.count for event in prof.key_averages()}
    labels = [label for key in events if (label := Label.read(key))]
    return {
        "messages": events["c10d::send"],
        "labels": labels,
        "ledger": {(key.unit, key.collective, key.hop): traffic.calls for key, traffic in ledger.rows()},
    }


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_hops_across_nodes_run_once_per_step(ranks: Ranks, micro_batches: int) -> None:
    """The ledger says so, and the profiler's count of real messages agrees with it."""
    for result in ranks.run(_count_collectives, micro_batches):
        calls = result["ledger"]
        units = {unit for unit, _, _ in calls}
        assert units == {"(root)", "blocks.0", "blocks.1"}
        for unit in units:
            assert calls[unit, "all_gather", "across"] == 1
            assert calls[unit, "reduce_scatter", "across"] == 1
            assert calls[unit, "reduce_scatter", "in-node"] == micro_batches
            # FSDP2 keeps the root gathered from forward to backward
            gathers = micro_batches if unit == "(root)" else 2 * micro_batches
            assert calls[unit, "all_gather", "in-node"] == gathers
        assert result["messages"] == sum(calls.values())  # every hop has one peer, and every unit one chunk
        assert Label("all_gather", "across", "blocks.0") in result["labels"]
        assert Label("reduce_scatter", "recode", "blocks.0") in result["labels"] or micro_batches > 1


def _gathered_weights(config: zeropp.Config) -> list[bytes]:
    """The full weights as this rank holds them, at each gather of a run."""
    trainer = Trainer(config)
    seen = []
    for _ in range(2):
        trainer.step()
        for block in trainer.net.blocks:
            module = cast(FSDPModule, block)
            for _ in range(2):  # a fresh gather, and one from the node shard
                module.unshard()
                seen.append(b"".join(p.detach().clone().numpy().tobytes() for p in block.parameters()))
                module.reshard()
    return seen


@pytest.mark.parametrize(
    "config",
    [
        *CONFIGS.values(),
        zeropp.Config.paper(node_size=2, weights="int4"),
        zeropp.Config.wire16(node_size=2),
    ],
)
def test_all_ranks_hold_the_same_weights(ranks: Ranks, config: zeropp.Config) -> None:
    first, *others = ranks.run(_gathered_weights, config)
    assert all(other == first for other in others)
    assert first[0] == first[1]
    assert first[0] != first[4]  # the second step changed them


def _frozen_run() -> dict[str, int]:
    trainer = Trainer(None)
    for p in trainer.net.blocks[0].parameters():
        p.requires_grad_(False)
    trainer.zpp = zeropp.apply(trainer.net, ON_2X2)
    trainer.optimizer = OPTIMIZERS["adamw-fused"](trainer.net.parameters())  # frozen ones are in it, too
    for _ in range(3):
        trainer.step()
    ledger = trainer.zpp.ledger
    return {
        name: ledger.total(unit=name, collective="all_gather", hop="across").calls
        for name in ("blocks.0", "blocks.1")
    }


def test_frozen_units_cross_nodes_once(ranks: Ranks) -> None:
    assert ranks.run(_frozen_run) == [{"blocks.0": 1, "blocks.1": 3}] * 4


def _accumulated_gradients(config: zeropp.Config, deferred: bool) -> dict[str, Any]:
    trainer = Trainer(config, micro_batches=3, accumulate_in_node=deferred)
    trainer.backward()
    return {"gradients": trainer.local_gradients(), "rank": dist.get_rank()}


@pytest.mark.parametrize("node_size", [1, 2, 4])
def test_accumulation_in_the_node_gives_the_same_gradients(ranks: Ranks, node_size: int) -> None:
    """With lossless codecs, putting off the cross-node hop changes rounding only."""
    exact = zeropp.Config(
        weights="none", gradients_in_node="none", gradients_across="none", node_size=node_size
    )
    together, separate = (ranks.run(_accumulated_gradients, exact, deferred) for deferred in (True, False))
    for a, b in zip(together, separate, strict=True):
        for name, gradient in a["gradients"].items():
            torch.testing.assert_close(gradient, b["gradients"][name], rtol=1e-5, atol=1e-7)
