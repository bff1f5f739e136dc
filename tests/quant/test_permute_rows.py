from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from zeropp.quant import Segment, make_codec
from zeropp.quant.permute_rows import gather_rows, scatter_rows, transposed_width


@given(st.integers(1, 12).flatmap(lambda rows: st.permutations(range(rows))))
def test_any_order_is_copied_as_indexing_would(order: list[int]) -> None:
    source = torch.randn(len(order), 10)[:, 2:9]  # a chunk: some columns of a larger buffer
    out = torch.zeros(len(order), 8, dtype=torch.bfloat16)[:, 1:]
    gather_rows(source, out, order)
    assert torch.equal(out, source[order].to(torch.bfloat16))
    back = torch.zeros(len(order), 7)
    scatter_rows(out, back, order)
    assert torch.equal(back[order], out.float())


@pytest.mark.parametrize("nodes", [1, 2, 3, 64])
@pytest.mark.parametrize("local", [1, 2, 8])
def test_ranks_numbered_node_by_node_are_one_copy(nodes: int, local: int) -> None:
    order = tuple(node * local + position for position in range(local) for node in range(nodes))
    assert transposed_width(order) > 0


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (0, 2, 1, 4, 3, 5), (0, 2, 4, 1, 3), (1, 0)])
def test_other_orders_are_no_transpose(order: tuple[int, ...]) -> None:
    """Among them the columns of a matrix whose last row is short."""
    assert transposed_width(order) == 0


def test_an_order_that_is_no_permutation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"order is \(0, 0\); expected a permutation of the 2 rows"):
        gather_rows(torch.zeros(2, 3), torch.zeros(2, 3), (0, 0))


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation that runs inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["none", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_cast_codecs_upload_nothing_and_copy_once(name: Any, dtype: torch.dtype) -> None:
    """An index tensor would synchronize the host with a device that has streams."""
    codec, aten = make_codec(name, dtype, [Segment(33, 128)]), torch.ops.aten
    rows, order = torch.randint(0, 100, (6, 33)).to(dtype), (0, 2, 4, 1, 3, 5)
    encoded, out = torch.empty(6, codec.row_bytes, dtype=torch.uint8), torch.empty_like(rows)
    with Operations() as encoding:
        codec.encode(rows, encoded, order)
    with Operations() as decoding:
        codec.decode(encoded, out, order)
    assert torch.equal(out, rows)
    writes = {aten.copy_, aten.zero_}
    views = {aten.slice, aten.view, aten.transpose, aten.alias, aten.detach}
    for seen in (encoding.seen, decoding.seen):
        assert set(seen) <= writes | views
        assert seen.count(aten.copy_) == 1
