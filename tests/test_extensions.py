"""Units gathered through a tensor subclass, as float8 and NF4 are: their bytes pass as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map_only

import zeropp
from tests.configs import CONFIGS
from tests.ranks import Ranks
from zeropp._describe import describe

aten = torch.ops.aten
STAYS_WRAPPED = {
    aten.as_strided.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
}


class GathersHalves(Tensor):
    """fp32 that is gathered as bf16, or as the bytes of it: only the subclass knows what they mean."""

    as_bytes = False

    @staticmethod
    def __new__(cls, data: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=data.dtype, requires_grad=data.requires_grad
        )

    def __init__(self, data: Tensor) -> None:
        self.data_ = data

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda wrapped: wrapped.data_, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return tree_map_only(Tensor, cls, out) if func in STAYS_WRAPPED else out

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        halves = self.data_.to(torch.bfloat16)
        return (halves.view(torch.uint8) if self.as_bytes else halves,), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        halves = outputs[0].view(torch.bfloat16)
        if out is not None:
            out.copy_(halves)
            return None
        full = halves.to(param_dtype)
        return full, (full,)


class GathersBytes(GathersHalves):
    as_bytes = True


def make_net(subclass: type[GathersHalves]) -> nn.Sequential:
    torch.manual_seed(0)
    linears = [nn.Linear(64, 64, bias=False) for _ in range(2)]
    linears[0].weight = nn.Parameter(subclass(linears[0].weight.detach()))
    for linear in linears:
        fully_shard(linear)
    return nn.Sequential(*linears)


def _outputs(subclass: type[GathersHalves], name: str) -> Any:
    x, plain, ours = torch.randn(3, 64), make_net(subclass), make_net(subclass)
    zpp = zeropp.apply(ours, CONFIGS[name])
    with torch.no_grad():
        same = all(torch.equal(plain[0](x), ours[0](x)) for _ in range(2))  # from the shard, then reused
        quantized = not torch.equal(plain[1](x), ours[1](x))
    rows = [describe(comms) for comms in zpp.unit_comms]
    return same, quantized, [(row["weights"], row["notes"]) for row in rows]


@pytest.mark.parametrize("subclass", [GathersHalves, GathersBytes])
@pytest.mark.parametrize(
    ("config", "usual"),
    [("default", "int8 across -> int8 in-node"), ("delta", "delta-int4 across -> bf16 in-node")],
)
def test_a_subclass_with_gather_extensions(
    ranks: Ranks, subclass: type[GathersHalves], config: str, usual: str
) -> None:
    expected = [
        ("none across -> none in-node", f"weights sent as they are: gathered through {subclass.__name__}"),
        (usual, ""),
    ]
    assert ranks.run(_outputs, subclass, config) == [(True, True, expected)] * 4
