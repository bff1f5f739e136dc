"""What the adapter finds in FSDP2 models, and what it leaves alone."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

import zeropp
from tests.ranks import Ranks
from tests.training import Net, make_net
from zeropp.fsdp import find_units


def _units(net: nn.Module) -> dict[str, str | None]:
    return {unit.name: unit.why_left_alone() for unit in find_units(net)}


def _names() -> list[Any]:
    grouped = Net()
    fully_shard([grouped.embed, grouped.head])
    for block in grouped.blocks:
        fully_shard(block)
    fully_shard(grouped)
    compiled = Net()
    for block in compiled.blocks:
        fully_shard(block)
        block.compile()
    fully_shard(compiled)
    wrapped = torch.compile(compiled)
    return [_units(make_net()), _units(grouped), _units(wrapped)]  # type: ignore[arg-type]


def test_units_are_named_after_their_modules(ranks: Ranks) -> None:
    plain, grouped, compiled = ranks.run(_names, world=2)[0]
    assert plain == {"(root)": None, "blocks.0": None, "blocks.1": None}
    assert grouped == {"embed, head": None, "blocks.0": None, "blocks.1": None}
    assert compiled == plain


def _oddities() -> dict[str, Any]:
    """Units that FSDP2's own comms must serve, and units with remarks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {}

    alone = nn.Linear(4, 4)
    fully_shard(alone, mesh=mesh["shard"])
    found["sub-mesh"] = zeropp.apply(alone, zeropp.Config(node_size=2)).treatments[0].notes

    hybrid = nn.Linear(4, 4)
    fully_shard(hybrid, mesh=mesh)
    found["hsdp"] = zeropp.apply(hybrid, zeropp.Config(node_size=2)).treatments[0].notes

    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16().requires_grad_(False))
    fully_shard(mixed)
    found["mixed"] = zeropp.apply(mixed, zeropp.Config(node_size=2)).treatments[0].notes

    uniform = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16().requires_grad_(False))
    fully_shard(uniform, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    found["cast"] = zeropp.apply(uniform, zeropp.Config(node_size=2)).treatments[0].notes

    frozen = nn.Linear(4, 4).requires_grad_(False)
    fully_shard(frozen)
    found["frozen"] = zeropp.apply(frozen, zeropp.Config(node_size=2)).treatments[0].notes

    direct = nn.Linear(4, 4)
    fully_shard(direct)
    found["int4"] = zeropp.apply(direct, zeropp.Config(node_size=2, weights="int4")).treatments[0].notes

    custom = nn.Linear(4, 4)
    fully_shard(custom)
    cast(FSDPModule, custom).set_custom_all_gather(_CustomAllGather())  # type: ignore[arg-type]
    zpp = zeropp.apply(custom, zeropp.Config(node_size=2))
    found["custom"] = zpp.treatments[0].left_alone
    found["custom summary"] = zpp.summary()
    return found


class _CustomAllGather:
    pass


def test_what_is_remarkable_is_said(ranks: Ranks) -> None:
    found = ranks.run(_oddities)[0]
    assert found["sub-mesh"] == ["one node: no node shard to keep"]
    assert "HSDP's all-reduce stays FSDP2's" in found["hsdp"][0]
    assert found["mixed"] == ["weights sent as they are: dtype bfloat16 and float32"]
    assert found["cast"] == []
    assert found["frozen"] == ["frozen"]
    assert found["int4"] == ["int4 weights are known to ruin training"]
    assert found["custom"] == "has custom comms already: _CustomAllGather"
    assert "left alone: has custom comms already" in found["custom summary"]


def _one_rank() -> tuple[str | None, float]:
    net = make_net()
    zpp = zeropp.apply(net)
    out = net(torch.arange(5)).sum()
    out.backward()
    return zpp.treatments[0].left_alone, out.item()


def test_a_group_of_one_is_left_alone_and_works(ranks: Ranks) -> None:
    ((reason, value),) = ranks.run(_one_rank, world=1)
    assert reason == "a shard group of one rank: nothing is sent"
    assert value == value


def _several_groups() -> tuple[dict[str, str | None], bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    whole = FSDPMeshInfo(init_device_mesh("cpu", (4,)), shard_mesh_dim=0)
    inner = FSDPMeshInfo(mesh["inner"], shard_mesh_dim=0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def place(param: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(0), whole if param.ndim == 2 else inner)

    fully_shard(model, shard_placement_fn=place)
    zpp = zeropp.apply(model, zeropp.Config(node_size=2))
    out = model(torch.ones(2, 8)).sum()
    out.backward()
    dist.barrier()
    return {t.unit.name: t.left_alone for t in zpp.treatments}, bool(out.isfinite())


def test_several_parameter_groups_are_left_alone(ranks: Ranks) -> None:
    reasons, finite = ranks.run(_several_groups)[0]
    assert finite
    assert "several parameter groups" in str(reasons["(root)"])
