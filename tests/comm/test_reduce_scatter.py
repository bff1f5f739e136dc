"""The gradients' collective on real gloo ranks, without FSDP2."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

import zeropp
from tests.configs import CONFIGS, PARAMETERS
from tests.examples import examples
from tests.ranks import Ranks
from zeropp.comm import Ledger, Piece, ReduceScatter, Scratch, Wire
from zeropp.comm.reduce_scatter import GradientSync
from zeropp.comm.reduction import scale_of
from zeropp.cpu.comm_threads import ThreadWork, comm_thread
from zeropp.topology import Topology

LAYOUTS = [(1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (1, 3), (3, 1)]
# Largest error of one encoding, in units of the largest magnitude of its block: half a step, or a whole one
# where int4 clips the side opposite to the extreme.
HALF_STEP = {"none": 1e-6, "bf16": 2.0**-9, "int8": 0.51 / 127, "int4": 1.02 / 8}


def make_reduce_scatter(config: zeropp.Config, parameters: Sequence[int] = ()) -> ReduceScatter:
    group = dist.group.WORLD
    assert group is not None
    topology = Topology.of(group, config.node_size)
    hops = (topology.flat_hop(),) if config.route == "flat" else topology.hops()
    wire = Wire("unit", topology, Ledger(), Scratch())
    return ReduceScatter(wire, hops[::-1], config, pieces=lambda: tuple(Piece(numel) for numel in parameters))


def gradients_of(rank: int, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(7919 * seed + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def reduce_once(comm: ReduceScatter, full: Tensor, op: Any) -> Tensor:
    out = torch.full((full.numel() // dist.get_world_size(),), math.nan, dtype=full.dtype)
    comm(output_tensor=out, input_tensor=full, group=dist.group.WORLD, op=op)  # type: ignore[arg-type]
    return out


def _reduce(
    config: zeropp.Config, parameters: tuple[int, ...], dtype: torch.dtype, op_name: str, seed: int
) -> Tensor:
    op = {"avg": ReduceOp.AVG, "sum": ReduceOp.SUM, "premul": ReduceOp.PREMUL_SUM(0.125)}[op_name]
    comm = make_reduce_scatter(config, parameters)
    full = gradients_of(dist.get_rank(), dist.get_world_size() * sum(parameters), dtype, seed)
    before = full.clone()
    out = reduce_once(comm, full, op)
    assert torch.equal(full, before)
    return out


@examples(25)
@given(
    layout=st.sampled_from(LAYOUTS),
    parameters=PARAMETERS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    codecs=st.tuples(*[st.sampled_from(["none", "bf16", "int8", "int4"])] * 2),
    op=st.sampled_from(["avg", "sum", "premul"]),
    block_size=st.sampled_from([32, 128, 1024]),
    seed=st.integers(0, 1000),
)
def test_error_is_within_the_bound_of_the_codecs(
    ranks: Ranks,
    layout: tuple[int, int],
    parameters: tuple[int, ...],
    dtype: torch.dtype,
    codecs: tuple[Any, Any],
    op: str,
    block_size: int,
    seed: int,
) -> None:
    nodes, per_node = layout
    world = nodes * per_node
    config = zeropp.Config(
        gradients_in_node=codecs[0], gradients_across=codecs[1], block_size=block_size, node_size=per_node
    )
    results = ranks.run(_reduce, config, parameters, dtype, op, seed, world=world)
    inputs = [gradients_of(rank, world * sum(parameters), dtype, seed).double() for rank in range(world)]
    factor = {"avg": 1 / world, "sum": 1.0, "premul": 0.125}[op]
    exact = torch.stack(inputs).sum(0) * factor
    largest = max(x.abs().max().item() for x in inputs) * factor * world
    first = HALF_STEP[codecs[0]] if per_node > 1 else 0.0
    second = HALF_STEP[codecs[1]] if nodes > 1 else 0.0
    bound = largest * (first + second * (1 + first) + torch.finfo(dtype).eps)
    error = (torch.cat(results).double() - exact).abs().max().item()
    assert error <= bound


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_result_is_the_true_mean_whatever_the_number_of_ranks(
    ranks: Ranks, layout: tuple[int, int]
) -> None:
    """Fault 1 of the reference implementation: its result is too large by the number of local ranks."""
    nodes, per_node = layout
    world = nodes * per_node
    config = zeropp.Config(gradients_in_node="none", gradients_across="none", node_size=per_node)
    result = torch.cat(ranks.run(_reduce, config, (100,), torch.float32, "avg", 0, world=world))
    exact = torch.stack([gradients_of(rank, world * 100, torch.float32, 0) for rank in range(world)]).mean(0)
    torch.testing.assert_close(result, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_error_has_no_bias(ranks: Ranks, name: str) -> None:
    parameters = (50, 30_000, 77, 20_000)
    numel = sum(parameters)
    result = torch.cat(ranks.run(_reduce, CONFIGS[name], parameters, torch.float32, "avg", 3))
    exact = torch.stack([gradients_of(rank, 4 * numel, torch.float32, 3) for rank in range(4)]).mean(0)
    error = (result - exact).double()
    standard_error = error.std().item() / math.sqrt(error.numel())
    assert abs(error.mean().item()) < 4 * standard_error
    gain = (result.double() @ exact.double() / (exact.double() @ exact.double())).item()
    assert gain == pytest.approx(1.0, abs=0.01)


def test_the_default_is_more_exact_than_the_paper(ranks: Ranks) -> None:
    exact = torch.stack([gradients_of(rank, 4 * 9973, torch.float32, 5) for rank in range(4)]).mean(0)
    errors = {
        name: (torch.cat(ranks.run(_reduce, config, (9973,), torch.float32, "avg", 5)) - exact).norm()
        / exact.norm()
        for name, config in {
            "ours": zeropp.Config(node_size=2),
            "paper": zeropp.Config.paper(node_size=2),
            "wire16": zeropp.Config.wire16(node_size=2),
        }.items()
    }
    assert errors["wire16"] < 0.01 < errors["ours"] < 0.12 < errors["paper"] < 0.2


def _reduce_with(bad: float, position: int, config: zeropp.Config) -> Tensor:
    comm = make_reduce_scatter(config)
    full = gradients_of(dist.get_rank(), 4 * 300, torch.float32, 0)
    if dist.get_rank() == 3:
        full[position] = bad
    return reduce_once(comm, full, ReduceOp.AVG)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [*CONFIGS, "wire16"])
def test_what_is_not_finite_arrives_where_it_belongs(ranks: Ranks, bad: float, name: str) -> None:
    """Fault 3: a NaN vanishes in the reference implementation's quantizer."""
    config = CONFIGS.get(name) or zeropp.Config.wire16(node_size=2)
    owner, offset = 1, 140  # in the second block of rank 1's shard
    results = ranks.run(_reduce_with, bad, owner * 300 + offset, config)
    for rank, result in enumerate(results):
        assert result.isfinite().all() == (rank != owner)
    assert not results[owner][offset].isfinite()
    assert results[owner][:128].isfinite().all()  # other blocks are not touched


@examples(20)
@given(
    layout=st.sampled_from(LAYOUTS),
    parameters=st.sampled_from([(63,), (64,), (65,), (129,), (1009,), (50, 4097, 33)])
    | st.tuples(st.integers(1, 600)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    in_node=st.sampled_from(["bf16", "int8"]),
    rotate=st.booleans(),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    feedback=st.booleans(),
    block_size=st.sampled_from([64, 128, 1024]),
)
def test_every_option_in_every_layout(
    ranks: Ranks,
    layout: tuple[int, int],
    parameters: tuple[int, ...],
    dtype: torch.dtype,
    in_node: Any,
    rotate: bool,
    rounding: Any,
    feedback: bool,
    block_size: int,
) -> None:
    """By relative error: a rotation has no useful bound on that of one element."""
    nodes, per_node = layout
    world = nodes * per_node
    config = zeropp.Config(
        gradients_in_node=in_node, rotate=rotate, rounding=rounding, error_feedback=feedback,
        block_size=block_size, node_size=per_node,
    )  # fmt: skip
    result = torch.cat(ranks.run(_reduce, config, parameters, dtype, "avg", 0, world=world)).double()
    inputs = [gradients_of(rank, world * sum(parameters), dtype, 0).double() for rank in range(world)]
    exact = torch.stack(inputs).mean(0)
    bound = (0.02 if nodes == 1 else 0.16) * (2.2 if rounding == "stochastic" else 1.0)
    assert (result - exact).norm() <= bound * exact.norm()


def _same_noise(config: zeropp.Config) -> list[Tensor]:
    comm = make_reduce_scatter(config)
    full = gradients_of(dist.get_rank(), 4 * 300, torch.float32, 0)
    return [reduce_once(comm, full, ReduceOp.AVG) for _ in range(2)]


def test_noise_is_reproducible_and_never_the_same_twice(ranks: Ranks) -> None:
    config = zeropp.Config(rounding="stochastic", node_size=2)
    first, again = ranks.run(_same_noise, config), ranks.run(_same_noise, config)
    other = ranks.run(_same_noise, replace(config, seed=1))
    for rank in range(4):
        assert all(torch.equal(a, b) for a, b in zip(first[rank], again[rank], strict=True))
        assert not torch.equal(first[rank][0], first[rank][1])  # the next step
        assert not torch.equal(first[rank][0], other[rank][0])


def _accumulate(node_size: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    exact = zeropp.Config(gradients_in_node="none", gradients_across="none", node_size=node_size)
    comm = make_reduce_scatter(exact)
    world, numel = dist.get_world_size(), 77
    outputs = []
    for step in range(3):
        comm.gradients.sync = GradientSync.ACROSS if step == 2 else GradientSync.DEFERRED
        outputs.append(
            reduce_once(comm, gradients_of(dist.get_rank(), world * numel, dtype, step), ReduceOp.AVG)
        )
    again = reduce_once(comm, gradients_of(dist.get_rank(), world * numel, dtype, 9), ReduceOp.AVG)
    return outputs, again


@pytest.mark.parametrize(("node_size", "world"), [(2, 4), (1, 3), (3, 6), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulation_sums_in_fp32_and_starts_over(
    ranks: Ranks, node_size: int, world: int, dtype: torch.dtype
) -> None:
    def mean(seed: int) -> Tensor:
        return torch.stack(
            [gradients_of(rank, world * 77, dtype, seed).double() for rank in range(world)]
        ).mean(0)

    for rank, (outputs, again) in enumerate(ranks.run(_accumulate, node_size, dtype, world=world)):
        mine = slice(rank * 77, (rank + 1) * 77)
        if node_size == world:  # one node: nothing to put off
            expected = [mean(step)[mine] for step in range(3)]
        else:
            expected = [torch.zeros(77), torch.zeros(77), (mean(0) + mean(1) + mean(2))[mine]]
        for got, want in zip([*outputs, again], [*expected, mean(9)[mine]], strict=True):
            torch.testing.assert_close(
                got, want.to(dtype), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
            )


def _changed_layout() -> str:
    comm = make_reduce_scatter(zeropp.Config(node_size=2))
    comm.gradients.sync = GradientSync.DEFERRED
    reduce_once(comm, gradients_of(0, 4 * 10, torch.float32, 0), ReduceOp.AVG)
    with pytest.raises(RuntimeError) as error:
        reduce_once(comm, gradients_of(0, 4 * 11, torch.float32, 0), ReduceOp.AVG)
    return str(error.value)


def test_a_changed_layout_during_accumulation_is_an_error(ranks: Ranks) -> None:
    assert all("reduces 11 elements per rank" in message for message in ranks.run(_changed_layout))


def _double_gradients() -> Tensor:
    return reduce_once(
        make_reduce_scatter(zeropp.Config(node_size=2)),
        torch.arange(8, dtype=torch.float64) * (dist.get_rank() + 1),
        ReduceOp.SUM,
    )


def test_fp64_is_not_squeezed_through_fp32(ranks: Ranks) -> None:
    assert torch.equal(torch.cat(ranks.run(_double_gradients)), torch.arange(8, dtype=torch.float64) * 10)


def test_scale_of_an_unknown_operation() -> None:
    with pytest.raises(ValueError, match="FSDP2 uses AVG, SUM or PREMUL_SUM"):
        scale_of(ReduceOp.MAX, 4)


def _memory_of_gradients(config: zeropp.Config) -> tuple[bool, Tensor]:
    """Whether full gradients were gone before any other rank reduced, and what they were reduced to."""
    numel, rank = 1000, dist.get_rank()
    comm = make_reduce_scatter(config, (numel,))
    comm.execution = comm_thread("reduce")
    out = torch.empty(numel)
    is_gone = True
    if rank > 0:
        dist.barrier()
    full = gradients_of(rank, dist.get_world_size() * numel, torch.float32, seed=0)
    storage = weakref.ref(full.untyped_storage())
    work = comm(out, full, dist.group.WORLD, ReduceOp.AVG)  # type: ignore[arg-type]
    assert isinstance(work, ThreadWork)
    del full
    if rank == 0:
        work.wait_until_read()
        is_gone = storage() is None and not work.is_completed()
        dist.barrier()
    work.wait()
    return is_gone, out


@pytest.mark.parametrize("name", ["default", "paper", "feedback"])
def test_full_gradients_go_as_soon_as_they_are_encoded(ranks: Ranks, name: str) -> None:
    results = ranks.run(_memory_of_gradients, CONFIGS[name])
    assert all(is_gone for is_gone, _ in results)
    mean = sum(gradients_of(rank, 4000, torch.float32, seed=0) for rank in range(4)) / 4
    assert isinstance(mean, Tensor)
    for part, (_, reduced) in zip(mean.view(4, -1), results, strict=True):
        assert (reduced - part).abs().max() < 0.6
