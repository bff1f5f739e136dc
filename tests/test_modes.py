"""Everything else people do with FSDP2 models, under zeropp and under plain FSDP2, on real ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint  # type: ignore[attr-defined]
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeropp
from tests.configs import CONFIGS
from tests.ranks import Ranks
from tests.training import Block, Net, Trainer, batches, local, loss_of, make_net

ON_2X2 = zeropp.Config(node_size=2)


def _compare(make: Callable[[], Net], config: zeropp.Config, steps: int = 5) -> dict[str, Any]:
    """Train the same model under plain FSDP2 and under zeropp."""
    plain, ours = Trainer(None, net=make()), Trainer(config, net=make())
    losses = [[trainer.step() for _ in range(steps)] for trainer in (plain, ours)]
    assert ours.zpp is not None
    hops = {(key.unit, key.hop) for key, _ in ours.zpp.ledger.rows()}
    return {"plain": losses[0], "ours": losses[1], "hops": hops}


def mixed_precision(reduce_dtype: torch.dtype | None) -> Net:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    return make_net(mp_policy=policy)


def bf16_params_fp32_reduce() -> Net:
    return mixed_precision(torch.float32)


def bf16_params_bf16_reduce() -> Net:
    return mixed_precision(torch.bfloat16)


def bf16_reduce_of_fp32() -> Net:
    return make_net(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))


def fp16_reduce_of_fp32() -> Net:
    return make_net(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))


def offloaded() -> Net:
    return make_net(offload_policy=CPUOffloadPolicy(pin_memory=False))


def never_resharded() -> Net:
    return make_net(reshard_after_forward=False)


def grouped() -> Net:
    torch.manual_seed(0)
    net = Net()
    fully_shard([net.embed, net.head])
    fully_shard([*net.blocks])
    fully_shard(net)
    return net


def checkpointed() -> Net:
    torch.manual_seed(0)
    net = Net()
    for block in net.blocks:
        checkpoint(block)
        fully_shard(block)
    fully_shard(net)
    return net


def compiled() -> Net:
    net = make_net()
    for block in net.blocks:
        block.compile(backend="aot_eager")
    return net


def prefetching() -> Net:
    net = make_net()
    first, second = (cast(FSDPModule, block) for block in net.blocks)
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    return net


def async_unshard() -> Net:
    net = make_net()
    cast(FSDPModule, net)._set_unshard_async_op(True)
    return net


def resharded_to_two() -> Net:
    return make_net(reshard_after_forward=2)


def separate_groups() -> Net:
    net = make_net()
    cast(FSDPModule, net).set_separate_reduce_scatter_group(True)
    return net


def sum_reduction() -> Net:
    net = make_net()
    cast(FSDPModule, net).set_force_sum_reduction_for_comms(True)
    return net


def sharded_on_dim_one() -> Net:
    from torch.distributed.tensor import Shard

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim == 2 and param.shape[1] % 4 == 0 else None

    return make_net(shard_placement_fn=place)


MODES: list[Callable[[], Net]] = [
    bf16_params_fp32_reduce, bf16_params_bf16_reduce, bf16_reduce_of_fp32, fp16_reduce_of_fp32, offloaded,
    never_resharded, grouped, checkpointed, compiled, prefetching, async_unshard, resharded_to_two,
    separate_groups, sum_reduction, sharded_on_dim_one,
]  # fmt: skip


@pytest.mark.parametrize("name", ["default", "four_bit"])
@pytest.mark.parametrize("make", MODES)
def test_trains_like_plain_fsdp2(ranks: Ranks, make: Callable[[], Net], name: str) -> None:
    for result in ranks.run(_compare, make, CONFIGS[name]):
        assert result["ours"] == pytest.approx(result["plain"], rel=0.01)
        assert result["ours"] != result["plain"]  # it was not plain FSDP2 that trained
        assert {hop for _, hop in result["hops"]} >= {"across", "in-node"}


@pytest.mark.parametrize(
    "make", [bf16_params_bf16_reduce, offloaded, checkpointed, grouped, resharded_to_two]
)
def test_secondary_is_exact_in_other_modes(ranks: Ranks, make: Callable[[], Net]) -> None:
    kept, not_kept = (
        ranks.run(_compare, make, zeropp.Config(node_size=2, secondary=secondary))[0]["ours"]
        for secondary in (True, False)
    )
    assert kept == not_kept


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


class _Adapter(nn.Module):
    """A frozen linear layer with a small trainable correction."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(3, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return out


def lora(base_in_units_of_its_own: bool = False) -> Net:
    torch.manual_seed(0)
    net = Net()
    net.requires_grad_(False)
    for block in net.blocks:
        assert isinstance(block, Block)
        block.up = _Adapter(block.up)  # type: ignore[assignment]
        block.down = _Adapter(block.down)  # type: ignore[assignment]
        if base_in_units_of_its_own:
            fully_shard(block.up.base)  # type: ignore[arg-type]
            fully_shard(block.down.base)  # type: ignore[arg-type]
        fully_shard(block)
    fully_shard(net)
    return net


def _lora_run() -> dict[str, Any]:
    result = _compare(lora, ON_2X2, steps=6)
    trainer = Trainer(ON_2X2, net=lora())
    for _ in range(3):
        trainer.step()
    assert trainer.zpp is not None
    ledger = trainer.zpp.ledger
    for unit in ("(root)", "blocks.0"):
        result[unit] = ledger.total(unit=unit, collective="all_gather", hop="across").calls
    return result


def test_adapters_on_a_frozen_base(ranks: Ranks) -> None:
    for result in ranks.run(_lora_run):
        assert result["ours"] == pytest.approx(result["plain"], rel=0.01)
        assert result["(root)"] == 1  # frozen: embeddings and head cross nodes once
        assert result["blocks.0"] == 3


def _base_in_units_of_its_own(name: str) -> tuple[dict[str, int], int, int]:
    """Calls across nodes by unit, and bytes of the weights across nodes in the first step and in the last."""
    trainer = Trainer(CONFIGS[name], net=lora(base_in_units_of_its_own=True))
    assert trainer.zpp is not None
    ledger, sent = trainer.zpp.ledger, [0]
    for _ in range(4):
        trainer.step()
        sent.append(ledger.total(collective="all_gather", hop="across").wire_bytes)
    units = ("(root)", "blocks.0", "blocks.0.up.base", "blocks.1.down.base")
    calls = {unit: ledger.total(unit=unit, collective="all_gather", hop="across").calls for unit in units}
    return calls, sent[1] - sent[0], sent[-1] - sent[-2]


@pytest.mark.parametrize("name", ["default", "four_bit"])
def test_a_frozen_base_crosses_nodes_once_per_run(ranks: Ranks, name: str) -> None:
    for calls, first, last in ranks.run(_base_in_units_of_its_own, name):
        assert calls == {"(root)": 1, "blocks.0": 4, "blocks.0.up.base": 1, "blocks.1.down.base": 1}
        assert 0 < last < 0.2 * first  # adapters, biases and norms only


def _save(folder: str) -> list[float]:
    trainer = Trainer(ON_2X2)
    for _ in range(3):
        trainer.step()
    model_state, optimizer_state = get_state_dict(trainer.net, trainer.optimizer)
    state_dict_saver.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return [trainer.evaluate()]


def _load(folder: str, node_size: int) -> tuple[float, float]:
    trainer = Trainer(zeropp.Config(node_size=node_size))
    trainer.step()  # other weights, and a node shard of them
    model_state, optimizer_state = get_state_dict(trainer.net, trainer.optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    state_dict_loader.load(state, checkpoint_id=folder)
    set_state_dict(
        trainer.net, trainer.optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    trainer.data = batches(5)
    with torch.inference_mode():
        loss = loss_of(trainer.net, _fixed_batch()).item()
    trainer.step()
    return loss, trainer.evaluate()


def _fixed_batch() -> Tensor:
    return torch.arange(36).view(4, 9) % 29


def _full_state_loss(folder: str) -> float:
    """The loss of the checkpoint in a plain, unsharded model."""
    net = Net()
    state = {"model": net.state_dict()}
    state_dict_loader.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    with torch.no_grad():
        return loss_of(net, _fixed_batch()).item()


def test_dcp_to_another_world_size(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    ranks.run(_save, folder)
    exact = ranks.run(_full_state_loss, folder, world=1)[0]
    for world, node_size in ((6, 2), (2, 1), (4, 4)):
        results = ranks.run(_load, folder, node_size, world=world)
        assert len({loss for loss, _ in results}) == 1
        assert results[0][0] == pytest.approx(exact, rel=0.01)


def _full_state_dict() -> bool:
    trainer = Trainer(ON_2X2)
    trainer.step()
    options = StateDictOptions(full_state_dict=True)
    model_state, optimizer_state = get_state_dict(trainer.net, trainer.optimizer, options=options)
    saved: dict[str, Any] = copy.deepcopy(model_state)
    trainer.step()
    set_state_dict(
        trainer.net,
        trainer.optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=options,
    )
    trainer.evaluate()  # would raise if the load had gone unnoticed
    now: dict[str, Any] = get_model_state_dict(trainer.net, options=options)
    return all(torch.equal(now[name], saved[name]) for name in saved)


def test_full_state_dict(ranks: Ranks) -> None:
    assert all(ranks.run(_full_state_dict))


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


def _tensor_parallel(config: zeropp.Config | None, tp: int) -> tuple[list[float], str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(_Mlp(), _Mlp())
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    zpp = None if config is None else zeropp.apply(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    losses = []
    for _ in range(4):
        x = torch.randn(8, 12, generator=generator)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, "" if zpp is None else zpp.summary()


@pytest.mark.parametrize(
    ("world", "tp", "node_size", "layout"),
    [(4, 2, 2, "2 nodes x 1 rank"), (6, 2, 2, "3 nodes x 1 rank"), (4, 2, 4, "1 node x 2 ranks")],
)
def test_tensor_parallel_on_a_2d_mesh(ranks: Ranks, world: int, tp: int, node_size: int, layout: str) -> None:
    plain = ranks.run(_tensor_parallel, None, tp, world=world)
    ours = ranks.run(_tensor_parallel, zeropp.Config(node_size=node_size), tp, world=world)
    for (expected, _), (found, summary) in zip(plain, ours, strict=True):
        assert found == pytest.approx(expected, rel=0.02)
        assert found != expected
        assert layout in summary


def _mixed_dtypes() -> dict[str, Any]:
    """A unit that FSDP2 gathers as raw bytes: exact weights, kept in the node, and compressed gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).to(torch.bfloat16).requires_grad_(False))
    first = cast(nn.Linear, model[0])
    exact = first.weight.detach().clone()
    fully_shard(model)
    zpp = zeropp.apply(model, ON_2X2)
    cast(FSDPModule, model).unshard()
    same = torch.equal(first.weight, exact)
    cast(FSDPModule, model).reshard()
    for _ in range(2):
        cast(FSDPModule, model).unshard()
        cast(FSDPModule, model).reshard()
    return {"same": same, "across": zpp.ledger.total(hop="across").calls}


def test_mixed_dtypes_are_exact_and_kept(ranks: Ranks) -> None:
    assert ranks.run(_mixed_dtypes) == [{"same": True, "across": 1}] * 4
