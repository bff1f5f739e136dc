from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

import zeropp
from tests.comm.test_all_gather import gather, make_all_gather, shard_of
from tests.comm.test_reduce_scatter import gradients_of, make_reduce_scatter, reduce_once
from tests.ranks import Ranks
from zeropp.comm import Weight, chunks
from zeropp.comm.execution import pipelined, run_to_end
from zeropp.comm.reduce_scatter import GradientSync


def test_all_chunks_are_on_the_wire_before_the_first_is_waited_for() -> None:
    log: list[str] = []

    def chunk(name: int) -> Generator[None]:
        for stage in "abc":
            log.append(f"{name}{stage}")
            if stage != "c":
                yield

    job = pipelined(chunk(name) for name in range(3))
    next(job)  # returns before anything is waited for
    assert log == ["0a", "1a", "2a"]
    run_to_end(job)
    assert log == ["0a", "1a", "2a", "0b", "1b", "2b", "0c", "1c", "2c"]


def _collectives(config: zeropp.Config, parameters: tuple[int, ...]) -> tuple[Any, ...]:
    numel = sum(parameters)
    comm = make_all_gather(config, [Weight(numel, torch.bfloat16) for numel in parameters])
    shard = shard_of(dist.get_rank(), numel, torch.bfloat16)
    weights = [gather(comm, shard), gather(comm, shard)]
    reducer = make_reduce_scatter(config, parameters)
    results: list[Tensor] = []
    for step in range(3):
        reducer.gradients.sync = GradientSync.ACROSS if step else GradientSync.DEFERRED
        gradients = gradients_of(dist.get_rank(), dist.get_world_size() * numel, torch.bfloat16, step)
        results.append(reduce_once(reducer, gradients, ReduceOp.AVG))
    calls = {(k.collective, k.hop): t.calls for k, t in comm.wire.ledger.rows()}
    calls |= {(k.collective, k.hop): t.calls for k, t in reducer.wire.ledger.rows()}
    return weights, results, calls


@pytest.mark.parametrize("layout", [(2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("gradients", ["int4", "bf16"])
def test_cutting_into_chunks_changes_no_bit(ranks: Ranks, layout: tuple[int, int], gradients: Any) -> None:
    nodes, per_node = layout
    config = zeropp.Config(node_size=per_node, gradients_across=gradients)
    parameters = (33, chunks.MIN_CHUNK_ELEMENTS + 777, 100, 2 * chunks.MIN_CHUNK_ELEMENTS + 5)
    whole, cut = (
        ranks.run(_collectives, replace(config, chunks=count), parameters, world=nodes * per_node)
        for count in (1, 3)
    )
    for (weights, results, calls), (cut_weights, cut_results, cut_calls) in zip(whole, cut, strict=True):
        assert all(
            torch.equal(a, b) for a, b in zip(weights + results, cut_weights + cut_results, strict=True)
        )
        assert cut_calls == {key: 3 * count for key, count in calls.items()}


def _nothing() -> int:
    comm, reducer = (make(zeropp.Config(node_size=2)) for make in (make_all_gather, make_reduce_scatter))
    empty = gather(comm, torch.empty(0))  # type: ignore[arg-type]
    reduced = reduce_once(reducer, torch.empty(0), ReduceOp.AVG)  # type: ignore[arg-type]
    return empty.numel() + reduced.numel()


def test_a_unit_without_elements_sends_nothing(ranks: Ranks) -> None:
    assert ranks.run(_nothing) == [0] * 4
