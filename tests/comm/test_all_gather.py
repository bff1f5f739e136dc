"""The weights' collective on real gloo ranks, without FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zeropp
from tests.configs import PARAMETERS
from tests.examples import examples
from tests.ranks import Ranks
from zeropp.comm import AllGather, Ledger, Scratch, StaleWeightsError, Weight, Wire
from zeropp.topology import Topology


def make_all_gather(config: zeropp.Config, weights: Sequence[Weight] = ()) -> AllGather:
    group = dist.group.WORLD
    assert group is not None
    topology = Topology.of(group, config.node_size)
    hops = (topology.flat_hop(),) if config.route == "flat" else topology.hops()
    return AllGather(Wire("unit", topology, Ledger(), Scratch()), hops, config, lambda: tuple(weights))


def shard_of(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def gather(comm: AllGather, shard: Tensor) -> Tensor:
    """As FSDP2 calls it: the shard is a view into the output."""
    world, rank = dist.get_world_size(), dist.get_rank()
    out = comm.allocate((world * shard.numel(),), dtype=shard.dtype, device=shard.device)
    mine = out[rank * shard.numel() : (rank + 1) * shard.numel()]
    mine.copy_(shard)
    work = comm(output_tensor=out, input_tensor=mine, group=dist.group.WORLD)  # type: ignore[arg-type]
    assert work is None
    return out


def _gather_twice(
    config: zeropp.Config, parameters: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Any]:
    comm = make_all_gather(config, [Weight(numel, dtype) for numel in parameters])
    shard = shard_of(dist.get_rank(), sum(parameters), dtype)
    first, second = gather(comm, shard), gather(comm, shard)
    calls = {key.hop: traffic.calls for key, traffic in comm.wire.ledger.rows()}
    return first, second, (calls, sum(node_shard.nbytes for node_shard in comm.node_shards))


@examples(25)
@given(
    layout=st.sampled_from([(1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (1, 3), (3, 1)]),
    parameters=PARAMETERS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    codec=st.sampled_from(["none", "bf16", "int8", "int4", "delta-int4"]),
    route=st.sampled_from(["two-hop", "flat"]),
    secondary=st.booleans(),
    block_size=st.sampled_from([32, 128]),
)
def test_every_rank_gets_the_same_decoded_weights(
    ranks: Ranks,
    layout: tuple[int, int],
    parameters: tuple[int, ...],
    dtype: torch.dtype,
    codec: Any,
    route: Any,
    secondary: bool,
    block_size: int,
) -> None:
    nodes, per_node = layout
    if codec == "delta-int4":
        route, secondary = "two-hop", True
    kept = secondary and route == "two-hop"
    config = zeropp.Config(
        weights=codec, secondary=kept, route=route, node_size=per_node, block_size=block_size,
        gradients_in_node="none", gradients_across="none",
    )  # fmt: skip
    results = ranks.run(_gather_twice, config, parameters, dtype, world=nodes * per_node)
    exact = torch.cat([shard_of(rank, sum(parameters), dtype) for rank in range(nodes * per_node)])
    reference = results[0][0]
    assert all(torch.equal(out, reference) for first, second, _ in results for out in (first, second))
    int8 = 0.51 / 127
    step = {"none": 0.0, "bf16": 2.0**-8, "int8": int8, "int4": 1.02 / 8, "delta-int4": int8 + 2.0**-8}[codec]
    error = (reference.double() - exact.double()).abs().max().item()
    rounding = 0.0 if codec == "none" else torch.finfo(dtype).eps
    assert error <= exact.abs().max().item() * (step + rounding)
    calls, kept_bytes = results[0][2]
    if kept and nodes > 1:
        assert calls["across"] == 1  # the second gather found the node shard
        assert kept_bytes > 0
    else:
        assert set(calls.values()) == {2}


def _gather_bytes() -> tuple[Tensor, Tensor]:
    mixed = torch.arange(37, dtype=torch.uint8) + dist.get_rank()
    return gather(make_all_gather(zeropp.Config(node_size=2)), mixed), mixed


def test_bytes_that_nothing_is_known_of_pass_untouched(ranks: Ranks) -> None:
    """FSDP2 passes raw bytes for a unit with several dtypes."""
    results = ranks.run(_gather_bytes)
    exact = torch.cat([mixed for _, mixed in results])
    assert all(torch.equal(full, exact) for full, _ in results)


def _gather_async() -> Tensor:
    comm = make_all_gather(zeropp.Config.off())
    out = torch.empty(8)
    work = comm(out, torch.full((2,), float(dist.get_rank())), dist.group.WORLD, async_op=True)  # type: ignore[arg-type]
    assert work is not None
    work.wait()
    return out


def test_off_returns_the_backends_work(ranks: Ranks) -> None:
    assert all(torch.equal(out, torch.arange(4.0).repeat_interleave(2)) for out in ranks.run(_gather_async))


def _edit_and_gather(tell: bool) -> tuple[str, Tensor]:
    comm = make_all_gather(zeropp.Config(node_size=2, weights="none"))
    shard = shard_of(dist.get_rank(), 5000, torch.float32)
    gather(comm, shard)
    shard[1234] += 1e-3
    if tell:
        comm.invalidate()
    try:
        return "", gather(comm, shard)
    except StaleWeightsError as error:
        return str(error), shard


def test_an_edit_is_an_error_until_told(ranks: Ranks) -> None:
    assert all("call invalidate()" in message for message, _ in ranks.run(_edit_and_gather, False))
    results = ranks.run(_edit_and_gather, True)
    for rank, (message, full) in enumerate(results):
        assert message == ""
        exact = shard_of(rank, 5000, torch.float32)
        exact[1234] += 1e-3
        assert torch.equal(full[rank * 5000 : (rank + 1) * 5000], exact)
