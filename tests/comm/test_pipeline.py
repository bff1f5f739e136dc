from __future__ import annotations

from collections.abc import Generator
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

import zeropp
from tests.comm.test_all_gather import gather, make_all_gather, shard_of
from tests.comm.test_reduce_scatter import gradients_of, make_reduce_scatter, reduce_once
from tests.ranks import Ranks
from zeropp.comm import pipeline

LENGTHS = st.one_of(st.integers(0, 300), st.integers(2000, 2100), st.integers(10**5, 10**6))
PARAMETERS = st.lists(LENGTHS, min_size=1, max_size=8).map(tuple).filter(sum)


@given(PARAMETERS, st.booleans(), st.sampled_from([32, 128, 4096]))
def test_chunks_cover_a_row_in_whole_blocks(
    parameters: tuple[int, ...], all_have_gradients: bool, block_size: int
) -> None:
    numel = sum(parameters)
    chunks = pipeline.column_chunks(numel, block_size, parameters if all_have_gradients else (1, *parameters))
    assert 1 <= len(chunks) <= pipeline.MAX_CHUNKS
    slices = [chunk.at for chunk in chunks]
    assert [at.start for at in slices] == [0, *(at.stop for at in slices[:-1])]
    assert slices[-1].stop == numel
    assert all(at.stop > at.start for at in slices)
    if len(chunks) > 1:
        assert numel >= 2 * pipeline.MIN_CHUNK_ELEMENTS
    blocks = [start for chunk in chunks for start in block_edges(chunk, block_size)]
    whole = pipeline.Columns(
        slice(0, numel), pipeline.block_starts(parameters, block_size) if all_have_gradients else ()
    )
    assert blocks == block_edges(whole, block_size)  # so cutting changes no block


def block_edges(columns: pipeline.Columns, block_size: int) -> list[int]:
    """Where blocks start."""
    first, last = columns.at.start, columns.at.stop
    runs = pairwise((first, *(first + start for start in columns.block_starts), last))
    return [edge for start, stop in runs for edge in range(start, stop, block_size)]


@given(PARAMETERS, st.sampled_from([32, 128]))
def test_long_parameters_have_blocks_of_their_own(parameters: tuple[int, ...], block_size: int) -> None:
    numel = sum(parameters)
    blocks = block_edges(
        pipeline.Columns(slice(0, numel), pipeline.block_starts(parameters, block_size)), block_size
    )
    starts = list(accumulate(parameters, initial=0))
    long = [length >= pipeline.LONG_PARAMETER_BLOCKS * block_size for length in parameters]
    for (start, stop), is_long in zip(pairwise(starts), long, strict=True):
        if is_long:
            assert {start, stop} <= {*blocks, numel}
    padding = sum(-(stop - start) % block_size for start, stop in pairwise((*blocks, numel)))
    assert padding <= (1 + 2 * sum(long)) * block_size


def test_newer_chunks_advance_before_older_ones_wait() -> None:
    log: list[str] = []

    def chunk(name: int) -> Generator[None]:
        for stage in "abc":
            log.append(f"{name}{stage}")
            if stage != "c":
                yield

    pipeline.run_pipelined(chunk(name) for name in range(3))
    assert log == ["0a", "1a", "0b", "2a", "1b", "0c", "2b", "1c", "2c"]


def _collectives(config: zeropp.Config, max_chunks: int, parameters: tuple[int, ...]) -> tuple[Any, ...]:
    numel = sum(parameters)
    chunks = pipeline.MAX_CHUNKS
    pipeline.MAX_CHUNKS = max_chunks
    try:
        comm = make_all_gather(config, parameters)
        shard = shard_of(dist.get_rank(), numel, torch.bfloat16)
        weights = [gather(comm, shard), gather(comm, shard)]
        reducer = make_reduce_scatter(config, parameters)
        results: list[Tensor] = []
        for step in range(3):
            reducer.sync_across = step != 0
            gradients = gradients_of(dist.get_rank(), dist.get_world_size() * numel, torch.bfloat16, step)
            results.append(reduce_once(reducer, gradients, ReduceOp.AVG))
        calls = {(k.collective, k.hop): t.calls for k, t in comm.wire.ledger.rows()}
        calls |= {(k.collective, k.hop): t.calls for k, t in reducer.wire.ledger.rows()}
    finally:
        pipeline.MAX_CHUNKS = chunks
    return weights, results, calls


@pytest.mark.parametrize("layout", [(2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("gradients", ["int4", "bf16"])
def test_cutting_into_chunks_changes_no_bit(ranks: Ranks, layout: tuple[int, int], gradients: Any) -> None:
    nodes, per_node = layout
    config = zeropp.Config(node_size=per_node, gradients_across=gradients)
    parameters = (33, pipeline.MIN_CHUNK_ELEMENTS + 777, 100, 2 * pipeline.MIN_CHUNK_ELEMENTS + 5)
    assert pipeline.block_starts(parameters, config.block_size)
    whole, cut = (
        ranks.run(_collectives, config, chunks, parameters, world=nodes * per_node) for chunks in (1, 3)
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
