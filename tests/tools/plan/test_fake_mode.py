from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeropp.tools.plan.fake_mode import COPIES, FILLS, QUICK, VIEWS, QuickFakeTensorMode

aten = torch.ops.aten

CALLS: dict[Any, Callable[[Tensor, Tensor], Any]] = {
    aten._unsafe_view.default: lambda x, y: aten._unsafe_view(x, [24]),
    aten.alias.default: lambda x, y: aten.alias(x),
    aten.as_strided.default: lambda x, y: x.as_strided((2, 3), (1, 4), 5),
    aten.detach.default: lambda x, y: x.detach(),
    aten.expand.default: lambda x, y: x.expand(5, 2, 3, 4),
    aten.permute.default: lambda x, y: x.permute(2, 0, 1),
    aten.select.int: lambda x, y: x[:, 1],
    aten.slice.Tensor: lambda x, y: x[:, 1:],
    aten.split.Tensor: lambda x, y: torch.split(x, 2, dim=1),
    aten.split_with_sizes.default: lambda x, y: torch.split(x, [1, 2], dim=1),
    aten.squeeze.dim: lambda x, y: x[:, :1].squeeze(1),
    aten.t.default: lambda x, y: x[0].t(),
    aten.transpose.int: lambda x, y: x.transpose(0, 2),
    aten.unsqueeze.default: lambda x, y: x.unsqueeze(1),
    aten.view.default: lambda x, y: x.view(6, 4),
    aten.view.dtype: lambda x, y: x.view(torch.uint8),
    aten.add_.Scalar: lambda x, y: aten.add_.Scalar(x, 1.0),
    aten.add_.Tensor: lambda x, y: x.add_(y),
    aten.clone.default: lambda x, y: x.transpose(0, 1).clone(),
    aten.copy_.default: lambda x, y: x.copy_(y.to(torch.bfloat16)),
    aten.fill_.Scalar: lambda x, y: x.fill_(1.0),
    aten.normal_.default: lambda x, y: x.normal_(std=0.1),
    aten.uniform_.default: lambda x, y: x.uniform_(),
    aten.zero_.default: lambda x, y: x.zero_(),
}


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


def _result(mode: FakeTensorMode, func: Any) -> list[Any]:
    """Return every property of the results that a step could depend on."""
    with mode, _Operations() as operations:
        x, y = torch.empty(2, 3, 4), torch.empty(3, 4)
        out = CALLS[func](x, y)
    assert func in operations.seen
    return [
        (
            *(type(part), part.shape, part.stride(), part.storage_offset(), part.dtype, part.device),
            *(part is x, part.untyped_storage()._cdata == x.untyped_storage()._cdata),
            *(part.untyped_storage().nbytes(), x._version, part._version),
        )
        for part in tree_leaves(out)
    ]


def test_all_are_compared() -> None:
    assert set(CALLS) == VIEWS | COPIES | FILLS


@pytest.mark.parametrize("func", CALLS, ids=str)
def test_results_equal_those_of_torchs_own_mode(func: Any) -> None:
    quick = _result(QuickFakeTensorMode(), func)
    assert quick == _result(FakeTensorMode(), func)
    assert quick[0][0] is FakeTensor


def test_torch_raises_its_own_errors() -> None:
    with QuickFakeTensorMode():
        x = torch.empty(2, 3)
        with pytest.raises(RuntimeError, match="shape '\\[4\\]' is invalid for input of size 6"):
            x.view(4)
        with pytest.raises(RuntimeError):
            x.copy_(torch.empty(5))


def test_known_values_stay_known() -> None:
    """torch stores the value of a tensor that is made of a number."""
    with QuickFakeTensorMode():
        known = torch.tensor(3.0)
        assert aten.alias.default in QUICK
        assert float(aten.alias(known).view(1)[0]) == 3.0
        known.fill_(4.0)
        assert float(known) == 4.0


def test_tensors_on_other_devices_use_torchs_own_mode() -> None:
    with QuickFakeTensorMode():
        assert torch.empty(2, 3, device="cuda").view(6).device.type == "cuda"
