from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from zeropp.comm import chunks

LENGTHS = st.one_of(st.integers(0, 300), st.integers(2000, 2100), st.integers(10**5, 10**6))
PARAMETERS = st.lists(LENGTHS, min_size=1, max_size=8).map(tuple).filter(sum)


@given(PARAMETERS, st.booleans(), st.sampled_from([32, 128, 4096]), st.integers(1, 16))
def test_chunks_cover_a_row_in_whole_blocks(
    parameters: tuple[int, ...], all_have_gradients: bool, block_size: int, most: int
) -> None:
    numel = sum(parameters)
    reduced = parameters if all_have_gradients else (1, *parameters)
    cut = chunks.column_chunks(chunks.Cut(most), numel, block_size, reduced)
    assert 1 <= len(cut) <= most
    slices = [chunk.at for chunk in cut]
    assert [at.start for at in slices] == [0, *(at.stop for at in slices[:-1])]
    assert slices[-1].stop == numel
    assert all(at.stop > at.start for at in slices)
    if len(cut) > 1:
        assert numel >= 2 * chunks.MIN_CHUNK_ELEMENTS
    blocks = [start for chunk in cut for start in block_edges(chunk, block_size)]
    whole = chunks.Columns(
        slice(0, numel), chunks.block_starts(parameters, block_size) if all_have_gradients else ()
    )
    assert blocks == block_edges(whole, block_size)  # so cutting changes no block


@given(st.integers(1, 16), st.booleans())
def test_a_number_of_chunks_is_obeyed_and_auto_knows_gloo(most: int, on_gloo: bool) -> None:
    numel = 16 * chunks.MIN_CHUNK_ELEMENTS
    assert len(chunks.column_chunks(chunks.Cut.of(most, on_gloo), numel, 128)) == most
    assert len(chunks.column_chunks(chunks.Cut.of("auto", on_gloo), numel, 128)) == (1 if on_gloo else 2)
    assert len(chunks.column_chunks(chunks.Cut.of("auto", on_gloo), 2 * numel, 128)) == 2


def block_edges(columns: chunks.Columns, block_size: int) -> list[int]:
    """Where blocks start."""
    first, last = columns.at.start, columns.at.stop
    runs = pairwise((first, *(first + start for start in columns.block_starts), last))
    return [edge for start, stop in runs for edge in range(start, stop, block_size)]


@given(PARAMETERS, st.sampled_from([32, 128]))
def test_long_parameters_have_blocks_of_their_own(parameters: tuple[int, ...], block_size: int) -> None:
    numel = sum(parameters)
    blocks = block_edges(
        chunks.Columns(slice(0, numel), chunks.block_starts(parameters, block_size)), block_size
    )
    starts = list(accumulate(parameters, initial=0))
    long = [length >= chunks.LONG_PARAMETER_BLOCKS * block_size for length in parameters]
    for (start, stop), is_long in zip(pairwise(starts), long, strict=True):
        if is_long:
            assert {start, stop} <= {*blocks, numel}
    padding = sum(-(stop - start) % block_size for start, stop in pairwise((*blocks, numel)))
    assert padding <= (1 + 2 * sum(long)) * block_size
