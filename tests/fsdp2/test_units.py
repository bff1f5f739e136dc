"""What the adapter finds in FSDP2 models, and what it leaves alone."""

from __future__ import annotations

from itertools import groupby
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

import zeropp
from tests.ranks import Ranks
from tests.training import Net, make_net
from zeropp._describe import describe, remarks
from zeropp.fsdp2.units import find_units
from zeropp.fsdp2.versions import READER, ReaderOf213

IS_213 = READER is ReaderOf213


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
    found["sub-mesh"] = remarks(zeropp.apply(alone, zeropp.Config(node_size=2)).unit_comms[0])

    hybrid = nn.Linear(4, 4)
    fully_shard(hybrid, mesh=mesh)
    found["hsdp"] = remarks(zeropp.apply(hybrid, zeropp.Config(node_size=2)).unit_comms[0])

    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16().requires_grad_(False))
    fully_shard(mixed)
    found["mixed"] = remarks(zeropp.apply(mixed, zeropp.Config(node_size=2)).unit_comms[0])

    uniform = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16().requires_grad_(False))
    fully_shard(uniform, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    found["cast"] = remarks(zeropp.apply(uniform, zeropp.Config(node_size=2)).unit_comms[0])

    frozen = nn.Linear(4, 4).requires_grad_(False)
    fully_shard(frozen)
    found["frozen"] = remarks(zeropp.apply(frozen, zeropp.Config(node_size=2)).unit_comms[0])

    direct = nn.Linear(4, 4)
    fully_shard(direct)
    found["int4"] = remarks(zeropp.apply(direct, zeropp.Config(node_size=2, weights="int4")).unit_comms[0])

    custom = nn.Linear(4, 4)
    fully_shard(custom)
    cast(FSDPModule, custom).set_custom_all_gather(_CustomAllGather())  # type: ignore[arg-type]
    zpp = zeropp.apply(custom, zeropp.Config(node_size=2))
    found["custom"] = zpp.unit_comms[0].left_alone
    found["custom summary"] = zpp.summary()
    return found


class _CustomAllGather:
    pass


def test_what_is_remarkable_is_said(ranks: Ranks) -> None:
    found = ranks.run(_oddities)[0]
    assert found["sub-mesh"] == ["one node: no node shard to keep"]
    assert "HSDP's all-reduce stays FSDP2's" in found["hsdp"][0]
    assert found["mixed"] == found["cast"] == ["2 of 4 parameters frozen"]
    assert found["frozen"] == ["frozen"]
    assert found["int4"] == ["int4 weights are known to ruin training"]
    assert found["custom"] == "has custom comms already: _CustomAllGather"
    assert "left alone: has custom comms already" in found["custom summary"]


def _one_rank() -> tuple[str | None, float]:
    net = make_net()
    zpp = zeropp.apply(net)
    out = net(torch.arange(5)).sum()
    out.backward()
    return zpp.unit_comms[0].left_alone, out.item()


def test_a_group_of_one_is_left_alone_and_works(ranks: Ranks) -> None:
    ((reason, value),) = ranks.run(_one_rank, world=1)
    assert reason == "a shard group of one rank: nothing is sent"
    assert value == value


def _several_groups() -> tuple[dict[str, str | None], bool, str]:
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
    reasons = {comms.unit.name: comms.left_alone for comms in zpp.unit_comms}
    return reasons, bool(out.isfinite()), zpp.ledger.table()


def test_several_parameter_groups_are_left_alone(ranks: Ranks) -> None:
    reasons, finite, table = ranks.run(_several_groups)[0]
    assert finite
    assert "several parameter groups" in str(reasons["(root)"])
    assert "sent by this rank, without 1 unit of 144 parameters that FSDP2 sends itself" in table


class _Peeking(DefaultReduceScatter):
    """Remembers what FSDP2 gives it: the dtype, and lengths of runs of one value in the first rank's row."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.dtype = input_tensor.dtype
        row = input_tensor.view(dist.get_world_size(), -1)[0].tolist()
        self.runs = [(value, len(list(run))) for value, run in groupby(row)]
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


class _PeekingGather(DefaultAllGather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.runs = [(value, len(list(run))) for value, run in groupby(input_tensor.tolist())]
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


class _Numbered(nn.Module):
    """Parameters and gradients with a number each, in sizes that do not divide by the ranks."""

    SIZES = (5, 3, 9, 1, 7)

    def __init__(self, dtype: torch.dtype, frozen: int | None) -> None:
        super().__init__()
        self.numbers = nn.ParameterList(
            nn.Parameter(torch.full((size, 2), i + 1.0, dtype=dtype), requires_grad=i != frozen)
            for i, size in enumerate(self.SIZES)
        )

    def forward(self) -> Tensor:
        return torch.stack([(i + 1) * p.sum() for i, p in enumerate(self.numbers)]).sum()


def _packed(
    policy: MixedPrecisionPolicy,
    dtype: torch.dtype = torch.float32,
    frozen: int | None = None,
    grad_dtypes: dict[int, torch.dtype | None] | None = None,
) -> dict[str, Any]:
    """What FSDP2 packs for rank 0, and what the unit says it does."""
    model = _Numbered(dtype, frozen)
    for number, grad_dtype in (grad_dtypes or {}).items():
        model.numbers[number].grad_dtype = grad_dtype
    fully_shard(model, mp_policy=policy)
    (unit,) = find_units(model)
    gather, reduce, expected = _PeekingGather(), _Peeking(), unit.reduce_dtype()
    unit.install(gather, reduce)
    model().backward()
    return {
        "gathered": ([length for _, length in gather.runs], list(unit.gather_lengths())),
        "reduced": ([length for _, length in reduce.runs], [piece.numel for piece in unit.reduce_pieces()]),
        "dtype": (reduce.dtype, expected),
    }


BF16, FP32 = torch.bfloat16, torch.float32
POLICIES: dict[str, tuple[Any, ...]] = {
    "fp32": (MixedPrecisionPolicy(),),
    "bf16 parameters": (MixedPrecisionPolicy(), BF16),
    "bf16 compute": (MixedPrecisionPolicy(param_dtype=BF16),),
    "fp32 reduction": (MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),),
    "bf16 reduction": (MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16),),
    "fp64": (MixedPrecisionPolicy(), torch.float64),
    "frozen": (MixedPrecisionPolicy(), FP32, 2),
    "gradient dtypes": (MixedPrecisionPolicy(), FP32, None, {1: BF16, 3: BF16}),
    "gradient dtypes, bf16 compute": (MixedPrecisionPolicy(param_dtype=BF16), FP32, 4, {0: BF16, 2: None}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_lengths_and_dtypes_are_those_that_fsdp2_packs(ranks: Ranks, name: str) -> None:
    found = ranks.run(_packed, *POLICIES[name], world=2)[0]
    gathered, ours = found["gathered"]
    assert gathered == ours == [2 * -(-size // 2) for size in _Numbered.SIZES]
    reduced, ours = found["reduced"]
    assert reduced == ours
    packed, expected = found["dtype"]
    assert packed == expected


@pytest.mark.skipif(IS_213, reason="gradients are packed in the order of parameters")
def test_gradients_are_packed_in_another_order(ranks: Ranks) -> None:
    """Or the test above says nothing about the order."""
    found = ranks.run(_packed, *POLICIES["gradient dtypes"], world=2)[0]
    assert found["reduced"][0] != [2 * -(-size // 2) for size in _Numbered.SIZES]


def _sent_as_they_are() -> tuple[list[str], str]:
    model = nn.Linear(4, 4).double()
    fully_shard(model)
    zpp = zeropp.apply(model, zeropp.Config(node_size=2))
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    return remarks(zpp.unit_comms[0]), zpp.summary()


def test_gradients_that_cannot_be_encoded_are_named(ranks: Ranks) -> None:
    notes, summary = ranks.run(_sent_as_they_are)[0]
    assert notes == ["weights sent as they are: dtype float64", "gradients sent as they are: dtype float64"]
    assert "gradients" in summary


class _Partly(nn.Module):
    """One layer is used in every micro-batch, one in the last only, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.late, self.never = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, is_last: bool) -> Tensor:
        x = self.always(x)
        return self.late(x) if is_last else x


def _accumulated(
    policy: MixedPrecisionPolicy, dtype: torch.dtype, config: zeropp.Config | None, sync: str | None
) -> tuple[dict[str, Tensor], str]:
    """Gradients of three micro-batches, and FSDP2's assertion if it fails."""
    torch.manual_seed(0)
    model: Any = _Partly().to(dtype)
    fully_shard(model, mp_policy=policy)
    zpp = None if config is None else zeropp.apply(model, config)
    for micro_batch in range(3):
        is_last = micro_batch == 2
        if sync == "across" and zpp is not None:
            zpp.set_requires_cross_node_sync(is_last)
        elif sync == "all":
            model.set_requires_gradient_sync(is_last)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(micro_batch + 10 * dist.get_rank()))
        try:
            model(x.to(policy.param_dtype or dtype), is_last or sync == "all").float().sum().backward()
        except AssertionError as error:
            return {}, str(error)
    return {
        name: p.grad.full_tensor().float() for name, p in model.named_parameters() if p.grad is not None
    }, ""


FP32_REDUCTION = {
    "bf16 compute": (MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32), FP32),
    "bf16 parameters": (MixedPrecisionPolicy(reduce_dtype=FP32), BF16),
}


@pytest.mark.parametrize("name", FP32_REDUCTION)
def test_accumulation_with_unused_parameters_in_mixed_precision(ranks: Ranks, name: str) -> None:
    """https://github.com/pytorch/pytorch/issues/196996 is about accumulated and fresh gradients in one
    reduction; accumulation in the node reduces each micro-batch by itself."""
    policy = FP32_REDUCTION[name]
    exact = zeropp.Config(
        node_size=2, weights="none", secondary=False, gradients_in_node="none", gradients_across="none"
    )
    plain, _ = ranks.run(_accumulated, *policy, None, None)[0]
    ours, error = ranks.run(_accumulated, *policy, exact, "across")[0]
    assert not error
    assert {"never.weight", "never.bias"} == ours.keys() - plain.keys()
    assert not ours["never.weight"].any()
    for key, gradient in plain.items():  # FSDP2 adds micro-batches in the parameters' dtype
        torch.testing.assert_close(ours[key], gradient, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", FP32_REDUCTION)
def test_fsdp2_accumulates_beside_error_feedback(ranks: Ranks, name: str) -> None:
    """Error feedback sends zeros for unused parameters, beside gradients that FSDP2 holds in another dtype:
    https://github.com/pytorch/pytorch/issues/196996."""
    policy = FP32_REDUCTION[name]
    config = zeropp.Config(node_size=2, gradients_across="int8", error_feedback=True)
    plain, _ = ranks.run(_accumulated, *policy, None, "all")[0]
    ours, error = ranks.run(_accumulated, *policy, config, "all")[0]
    assert not error
    for key, gradient in plain.items():
        assert (ours[key] - gradient).norm() < 0.05 * gradient.norm()


def _assigned() -> tuple[str | None, str | None, bool]:
    """A model on the meta device that a loader fills by assigning parameters to modules, after `apply`."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(net)
    zpp = zeropp.apply(net, zeropp.Config(node_size=2))
    before = zpp.unit_comms[0].unit.frozen
    for module in net:
        for name, p in list(module.named_parameters()):
            loaded = torch.empty_like(p, device="cpu").fill_(0.5)
            setattr(module, name, nn.Parameter(loaded, requires_grad=False))
    output = net(torch.ones(2, 8))
    return before, zpp.unit_comms[0].unit.frozen, bool(output.isfinite().all())


def test_parameters_that_a_loader_assigns_are_looked_at_anew(ranks: Ranks) -> None:
    assert ranks.run(_assigned) == [(None, "frozen", True)] * 4


def test_a_unit_of_many_modules_has_a_short_label(ranks: Ranks) -> None:
    assert ranks.run(_label) == ["0 and 3 more"] * 4


def _label() -> str:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    fully_shard(list(net))
    return describe(zeropp.apply(net, zeropp.Config(node_size=2)).unit_comms[0])["unit"]
