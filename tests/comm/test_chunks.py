from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeropp.comm import chunks
from zeropp.comm.chunks import Piece, column_chunks, row_segments
from zeropp.quant import Segment, make_codec
from zeropp.quant.rotation import GROUP

FP32 = torch.float32
NAMES: tuple[Literal["int8", "int4"], ...] = ("int8", "int4")
ROWS = st.sampled_from([1, 8, 33, 64, 72, 96, 100, 128, 4096])
PIECES = st.lists(
    st.builds(lambda rows, row: Piece(rows * row, row), st.integers(0, 70), ROWS), min_size=1, max_size=8
)
LONG = st.just(Piece(300_001)) | st.just(Piece(40 * 8192, 8192))
BLOCK_SIZES = st.sampled_from([32, 64, 128, 4096])


def spans(segments: Sequence[Segment]) -> list[tuple[int, int, Segment]]:
    """First and last column of each segment."""
    edges = pairwise(accumulate((segment.numel for segment in segments), initial=0))
    return [(first, last, segment) for (first, last), segment in zip(edges, segments, strict=True)]


def block_edges(segments: Sequence[Segment], start: int = 0) -> list[int]:
    """Columns at which blocks start."""
    return [
        start + edge
        for first, last, segment in spans(segments)
        for edge in range(first, last, segment.block_size or segment.numel)
    ]


@given(PIECES, BLOCK_SIZES, st.booleans())
def test_no_block_holds_two_parameters_and_no_group_two_rows(
    pieces: list[Piece], block_size: int, merge: bool
) -> None:
    segments = row_segments(pieces, block_size, merge=merge)
    numel = sum(piece.numel for piece in pieces)
    assert sum(segment.numel for segment in segments) == numel
    starts = accumulate((piece.numel for piece in pieces), initial=0)
    places = [(start, piece) for start, piece in zip(starts, pieces, strict=False) if piece.numel]
    edges = set(block_edges(segments))
    for first, last, segment in spans(segments):
        inside = [(start, piece) for start, piece in places if first <= start < last]
        assert merge or len(inside) == 1
        assert sum(piece.numel for _, piece in inside) == segment.numel  # a piece is in one segment
        if segment.block_size is not None:
            assert {start for start, _ in inside} <= edges
        if segment.is_rotated:  # groups start where the segment does, and each row ends with a group
            assert segment.block_size is not None
            assert segment.block_size % GROUP == 0
            assert all(piece.row % GROUP == 0 for _, piece in inside)


@given(PIECES, BLOCK_SIZES)
def test_merging_changes_no_block(pieces: list[Piece], block_size: int) -> None:
    one, many = (row_segments(pieces, block_size, merge=merge) for merge in (True, False))
    assert set(block_edges(one)) <= set(block_edges(many))  # those that are sent as they are have none
    blocks = [s for s in many if s.block_size is not None]
    assert sum(s.numel for s in one if s.block_size is not None) == sum(s.numel for s in blocks)
    assert {(s.block_size, s.is_rotated) for s in one} == {(s.block_size, s.is_rotated) for s in many}


@given(PIECES, LONG, PIECES, BLOCK_SIZES, st.integers(1, 16))
def test_chunks_cover_a_row_in_whole_blocks(
    before: list[Piece], long: Piece, after: list[Piece], block_size: int, most: int
) -> None:
    pieces = [*before, long, *after]
    segments = row_segments(pieces, block_size)
    numel = sum(piece.numel for piece in pieces)
    cut = column_chunks(chunks.ChunkPolicy(most), segments)
    assert 1 <= len(cut) <= most
    slices = [chunk.at for chunk in cut]
    assert [at.start for at in slices] == [0, *(at.stop for at in slices[:-1])]
    assert slices[-1].stop == numel
    assert all(chunk.numel == sum(segment.numel for segment in chunk.segments) > 0 for chunk in cut)
    if len(cut) > 1:
        assert numel >= 2 * chunks.MIN_CHUNK_ELEMENTS
    blocks = [edge for chunk in cut for edge in block_edges(chunk.segments, chunk.at.start)]
    assert blocks == block_edges(segments)  # so cutting changes no block
    whole = {(first, segment.block_size): last for first, last, segment in spans(segments)}
    for chunk in cut:
        for first, last, segment in spans(chunk.segments):  # an offset counts from the start of the whole
            start = chunk.at.start + first - segment.offset
            assert chunk.at.start + last <= whole[start, segment.block_size]


@given(st.integers(1, 16), st.booleans())
def test_a_number_of_chunks_is_obeyed_and_auto_knows_gloo(most: int, on_gloo: bool) -> None:
    numel = 16 * chunks.MIN_CHUNK_ELEMENTS
    row = [Segment(numel, 128)]
    assert len(column_chunks(chunks.ChunkPolicy.of(most, on_gloo), row)) == most
    assert len(column_chunks(chunks.ChunkPolicy.of("auto", on_gloo), row)) == (1 if on_gloo else 2)
    assert len(column_chunks(chunks.ChunkPolicy.of("auto", on_gloo), [Segment(2 * numel, 128)])) == 2


def test_no_segment_crosses_an_edge() -> None:
    pieces = [Piece(128), Piece(128), Piece(128)]
    assert len(row_segments(pieces, 128)) == 1
    assert [segment.numel for segment in row_segments(pieces, 128, edges=(128,))] == [128, 256]


def padded_shards(shapes: list[tuple[int, ...]], ranks: int) -> list[Piece]:
    """What FSDP2 puts into a row: rows of dimension 0, padded to a multiple of the ranks."""
    pieces = []
    for first, *others in shapes:
        row = 1
        for size in others:
            row *= size
        pieces.append(Piece(-(-first // ranks) * row, row))
    return pieces


LLAMA_8B = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 2, (4096, 14336)]
NORM, BIAS = [(768,), (768,)], (768,)
GPT2 = [*NORM, (2304, 768), (2304,), (768, 768), BIAS, *NORM, (3072, 768), (3072,), (768, 3072), BIAS]
MODELS: dict[str, list[tuple[int, ...]]] = {"Llama 8B": [*LLAMA_8B, (4096,), (4096,)], "GPT-2": GPT2}
"""Shapes of a layer: a model of large matrices, and one of many small tensors."""


@pytest.mark.parametrize("ranks", [64, 1024, 4096])
@pytest.mark.parametrize("model", MODELS)
def test_padding_costs_less_than_one_percent(model: str, ranks: int) -> None:
    """Counts int8 weights and int4 gradients together, against blocks that know no parameters."""
    pieces = padded_shards(MODELS[model], ranks)
    numel, segments = sum(piece.numel for piece in pieces), row_segments(pieces, 128)
    ours, least = (
        sum(make_codec(name, FP32, known).row_bytes for name in NAMES)
        for known in (segments, [Segment(numel, 128)])
    )
    assert ours <= 1.01 * least
