"""Everything else people do with FSDP2 models, under zeropp and under plain FSDP2, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeropp
from tests.configs import CONFIGS
from tests.ranks import Ranks
from tests.training import Net, losses_and_hops, make_net

ON_2X2 = zeropp.Config(node_size=2)


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


@cache
def trained(ranks: Ranks, make: Callable[[], Net]) -> list[Any]:
    """Losses and hops of each rank, under plain FSDP2 and two Configs, the default first."""
    return ranks.run(losses_and_hops, make, None, CONFIGS["default"], CONFIGS["four_bit"])


@pytest.mark.parametrize("make", MODES)
def test_trains_like_plain_fsdp2(ranks: Ranks, make: Callable[[], Net]) -> None:
    for outcomes in trained(ranks, make):
        (plain, _), *ours = outcomes
        for losses, hops in ours:
            assert losses == pytest.approx(plain, rel=0.01)
            assert losses != plain  # it was not plain FSDP2 that trained
            assert hops >= {"across", "in-node"}


@pytest.mark.parametrize(
    "make", [bf16_params_bf16_reduce, offloaded, checkpointed, grouped, resharded_to_two]
)
def test_secondary_is_exact_in_other_modes(ranks: Ranks, make: Callable[[], Net]) -> None:
    _, (kept, _), _ = trained(ranks, make)[0]
    ((not_kept, _),) = ranks.run(losses_and_hops, make, replace(CONFIGS["default"], secondary=False))[0]
    assert kept == not_kept


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
    for _ in range(3):
        x = torch.randn(8, 12, generator=generator)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, "" if zpp is None else zpp.summary()


@cache
def plain_parallel(ranks: Ranks, tp: int, world: int) -> list[tuple[list[float], str]]:
    return ranks.run(_tensor_parallel, None, tp, world=world)


@pytest.mark.parametrize(
    ("world", "tp", "node_size", "layout"),
    [(4, 2, 2, "2 nodes x 1 rank"), (6, 2, 2, "3 nodes x 1 rank"), (4, 2, 4, "1 node x 2 ranks")],
)
def test_tensor_parallel_on_a_2d_mesh(ranks: Ranks, world: int, tp: int, node_size: int, layout: str) -> None:
    ours = ranks.run(_tensor_parallel, zeropp.Config(node_size=node_size), tp, world=world)
    for (expected, _), (found, summary) in zip(plain_parallel(ranks, tp, world), ours, strict=True):
        assert found == pytest.approx(expected, rel=0.02)
        assert found != expected
        assert layout in summary


def _mixed_dtypes() -> dict[str, Any]:
    """A unit that FSDP2 gathers as raw bytes: each dtype is encoded by itself, and kept in the node."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(63, 8), nn.Linear(8, 64).to(torch.bfloat16).requires_grad_(False))
    first, second = cast(list[nn.Linear], list(model))
    exact = [linear.weight.detach().float().clone() for linear in (first, second)]
    fully_shard(model)
    zpp = zeropp.apply(model, ON_2X2)
    errors = []
    for _ in range(3):
        cast(FSDPModule, model).unshard()
        weights = [linear.weight.detach().float() for linear in (first, second)]
        errors += [float((x - y).abs().max() / y.abs().max()) for x, y in zip(weights, exact, strict=True)]
        cast(FSDPModule, model).reshard()
    return {"errors": errors, "across": zpp.ledger.total(hop="across").calls}


def test_mixed_dtypes_are_encoded_each_by_itself(ranks: Ranks) -> None:
    for result in ranks.run(_mixed_dtypes):
        assert all(0 < error < 0.006 for error in result["errors"])  # half a step of int8, and bf16
        assert len(set(result["errors"])) == 2
        assert result["across"] == 2  # each group once
