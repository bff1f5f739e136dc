"""What training loops do with gradients between backward and step, with zeropp in place."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import zeropp
from tests.ranks import Ranks
from tests.training import Trainer, local, loss_of

ON_2X2 = zeropp.Config(node_size=2)


def _gradient_divide_factor(factor: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """torchtitan sets a divide factor of 1.0 on every unit: PREMUL_SUM, which gloo itself does not have."""
    exact = zeropp.Config(gradients_in_node="none", gradients_across="none", weights="none", node_size=2)
    plain, ours = Trainer(None), Trainer(exact)
    for module in ours.net.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
    plain.backward()
    ours.backward()
    return plain.local_gradients(), ours.local_gradients()


@pytest.mark.parametrize("factor", [1.0, 4.0, 6.0])
def test_gradient_divide_factor(ranks: Ranks, factor: float) -> None:
    for plain, ours in ranks.run(_gradient_divide_factor, factor):
        for name, gradient in plain.items():
            torch.testing.assert_close(ours[name] * factor, gradient * 4, rtol=1e-5, atol=1e-6)


def _clipped(config: zeropp.Config | None) -> tuple[float, float]:
    trainer = Trainer(config)
    trainer.backward()
    norm = torch.nn.utils.clip_grad_norm_(trainer.net.parameters(), 0.1)
    after = torch.nn.utils.get_total_norm([p.grad for p in trainer.net.parameters() if p.grad is not None])
    return cast(DTensor, norm).full_tensor().item(), cast(DTensor, after).full_tensor().item()


def test_clip_grad_norm(ranks: Ranks) -> None:
    plain, ours = ranks.run(_clipped, None), ranks.run(_clipped, ON_2X2)
    assert len(set(ours)) == 1  # the same on all ranks
    assert ours[0][0] == pytest.approx(plain[0][0], rel=0.02)
    assert ours[0][1] == pytest.approx(0.1, rel=1e-3)


def _scaled_step(bad_rank: int | None) -> tuple[bool, float, float]:
    trainer = Trainer(ON_2X2)
    trainer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [local(p).clone() for p in trainer.net.parameters()]
    trainer.optimizer.zero_grad()
    loss = loss_of(trainer.net, next(trainer.data))
    if dist.get_rank() == bad_rank:
        loss = loss * torch.inf
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    scaler.step(trainer.optimizer)
    scaler.update()
    moved = any(not torch.equal(a, local(b)) for a, b in zip(before, trainer.net.parameters(), strict=True))
    return moved, scaler.get_scale(), trainer.evaluate()


def test_grad_scaler_skips_a_step_that_is_not_finite(ranks: Ranks) -> None:
    assert {(moved, scale) for moved, scale, _ in ranks.run(_scaled_step, None)} == {(True, 8.0)}
    for moved, scale, loss in ranks.run(_scaled_step, 2):
        assert not moved
        assert scale == 4.0
        assert loss == loss  # and the weights are still good


def _one_bad_gradient(value: float, row: int) -> bool:
    """One bad value in one rank's gradient of one weight: is this rank's shard of it finite?"""
    trainer = Trainer(ON_2X2)
    layer: nn.Linear = cast(Any, trainer.net.blocks[0]).up
    if dist.get_rank() == 3:

        def poison(module: nn.Module, inputs: Any) -> None:
            def hook(gradient: Tensor) -> Tensor:
                gradient = gradient.clone()
                gradient[row, 0] = value
                return gradient

            cast(Any, layer.weight).register_hook(hook)  # the whole weight: FSDP2 has just gathered it

        layer.register_forward_pre_hook(poison)
    trainer.backward()
    assert layer.weight.grad is not None
    return bool(local(layer.weight.grad).isfinite().all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_bad_gradient_reaches_its_owner(ranks: Ranks, value: float) -> None:
    # 37 rows over 4 ranks, 10 each: row 13 is rank 1's
    assert ranks.run(_one_bad_gradient, value, 13) == [True, False, True, True]


def _gradient_sync_off() -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """FSDP2's own way to accumulate: unsharded gradients, no communication."""
    gradients = []
    for config in (None, ON_2X2):
        trainer = Trainer(config)
        for micro_batch in range(3):
            cast(FSDPModule, trainer.net).set_requires_gradient_sync(micro_batch == 2)
            loss_of(trainer.net, next(trainer.data)).backward()  # type: ignore[no-untyped-call]
        gradients.append(trainer.local_gradients())
    assert trainer.zpp is not None
    calls = trainer.zpp.ledger.total(collective="reduce_scatter", hop="across").calls
    return gradients[0], gradients[1], calls


def test_set_requires_gradient_sync(ranks: Ranks) -> None:
    for plain, ours, calls in ranks.run(_gradient_sync_off):
        assert calls == 3  # once for each unit
        flat_plain, flat_ours = (torch.cat([g.flatten() for g in some.values()]) for some in (plain, ours))
        assert (flat_plain - flat_ours).norm() < 0.15 * flat_plain.norm()
