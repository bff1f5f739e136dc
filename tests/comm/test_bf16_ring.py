"""The 16-bit ring on real gloo ranks, against the same ring written down in plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

import zeropp
from tests.comm.test_reduce_scatter import gradients_of, make_reduce_scatter, reduce_once
from tests.examples import examples
from tests.ranks import Ranks
from zeropp.comm import Ledger, ReduceScatter, Scratch, Wire
from zeropp.comm.chunks import MIN_CHUNK_ELEMENTS
from zeropp.topology import Topology

OPS: dict[str, Any] = {"avg": ReduceOp.AVG, "sum": ReduceOp.SUM, "premul": ReduceOp.PREMUL_SUM(0.3)}


def bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


def written_down(inputs: list[Tensor], op: str, ring: list[int]) -> list[Tensor]:
    """What each rank gets: rows are passed from neighbour to neighbour of `ring`, and rounded each time."""
    world, dtype = len(inputs), inputs[0].dtype
    factor = bf16(torch.tensor({"avg": 1 / world, "sum": 1.0, "premul": 0.3}[op])).float()
    rows = [bf16(bf16(x).float() * factor).float().view(world, -1) for x in inputs]
    results: list[Tensor] = [torch.empty(0)] * world
    for place, owner in enumerate(ring):
        first, *others = [ring[(place + distance) % world] for distance in range(1, world + 1)]
        total = rows[first][owner]
        for rank in others:
            total = bf16(total + rows[rank][owner]).float()
        results[owner] = total.to(dtype)
    return results


def _reduce(numel: int, dtype: torch.dtype, op: str, seed: int, node_size: int) -> tuple[Tensor, bool]:
    full = gradients_of(dist.get_rank(), dist.get_world_size() * numel, dtype, seed)
    before = full.clone()
    comm = make_reduce_scatter(zeropp.Config.wire16(node_size=node_size))
    return reduce_once(comm, full, OPS[op]), torch.equal(full, before)


def equal_bits(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@examples(30)
@given(
    layout=st.sampled_from([(1, 2), (2, 1), (3, 1), (2, 2), (1, 3), (5, 1), (3, 2), (2, 3)]),
    numel=st.sampled_from([1, 2, 7, 128, 1009, MIN_CHUNK_ELEMENTS, 2 * MIN_CHUNK_ELEMENTS + 3])
    | st.integers(1, 600),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    op=st.sampled_from(list(OPS)),
    seed=st.integers(0, 1000),
)
def test_equals_the_ring_bit_for_bit(
    ranks: Ranks, layout: tuple[int, int], numel: int, dtype: torch.dtype, op: str, seed: int
) -> None:
    nodes, per_node = layout
    world = nodes * per_node
    results = ranks.run(_reduce, numel, dtype, op, seed, per_node, world=world)
    inputs = [gradients_of(rank, world * numel, dtype, seed) for rank in range(world)]
    for (got, input_is_untouched), want in zip(
        results, written_down(inputs, op, list(range(world))), strict=True
    ):
        assert equal_bits(got, want)
        assert input_is_untouched


def _with_something_not_finite(bad: float) -> Tensor:
    full = gradients_of(dist.get_rank(), 4 * 300, torch.float32, 0)
    if dist.get_rank() == 3:
        full[300 + 140] = bad
    return reduce_once(make_reduce_scatter(zeropp.Config.wire16(node_size=2)), full, ReduceOp.AVG)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives_and_stays_alone(ranks: Ranks, bad: float) -> None:
    for rank, result in enumerate(ranks.run(_with_something_not_finite, bad)):
        broken = (~result.isfinite()).nonzero().flatten().tolist()
        assert broken == ([140] if rank == 1 else [])
        if rank == 1:
            assert math.isnan(bad) == result[140].isnan().item()
            assert math.isnan(bad) or result[140].item() == bad


def _interleaved() -> tuple[Tensor, Any, int]:
    """Ranks 0, 2 on one node, 1, 3 on the other."""
    group = dist.group.WORLD
    assert group is not None
    topology = Topology(ranks=(0, 1, 2, 3), node_of=(0, 1, 0, 1), rank=dist.get_rank())
    wire = Wire("unit", topology, Ledger(), Scratch())
    comm = ReduceScatter(wire, (topology.flat_hop(),), zeropp.Config.wire16())
    out = reduce_once(comm, gradients_of(dist.get_rank(), 4 * 10, torch.float32, 0), ReduceOp.AVG)
    return out, wire.ledger.total(), wire.ledger.baseline_total().across_bytes


def test_the_ring_goes_node_by_node_whatever_the_numbering(ranks: Ranks) -> None:
    """Three rows of ten 2-byte elements leave a node of two ranks: 30 bytes for each of them."""
    inputs = [gradients_of(rank, 4 * 10, torch.float32, 0) for rank in range(4)]
    wanted = written_down(inputs, "avg", [0, 2, 1, 3])
    for (got, sent, baseline), want in zip(ranks.run(_interleaved), wanted, strict=True):
        assert equal_bits(got, want)
        assert (sent.calls, sent.wire_bytes, sent.across_bytes) == (1, 60, 30)
        assert baseline == 30


def _integers_on_the_flat_route() -> tuple[int, int]:
    config = zeropp.Config.wire16(node_size=2, gradients_in_node="int8", gradients_across="int8")
    comm = make_reduce_scatter(config)
    reduce_once(comm, gradients_of(dist.get_rank(), 4 * 128, torch.float32, 0), ReduceOp.AVG)
    sent = comm.wire.ledger.total()
    return sent.wire_bytes, sent.across_bytes


def test_integers_are_quantized_once_and_sent_to_each_owner(ranks: Ranks) -> None:
    """A ring would quantize at each of its hops."""
    row = 128 + 16  # a block and its scale, aligned
    assert ranks.run(_integers_on_the_flat_route) == [(3 * row, 2 * row)] * 4
