from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zeropp.quant import BlockFormat, CastFormat, Codec, Segment, cast, make_codec, reference
from zeropp.quant.codec import Part

NAMES = ["none", "bf16", "int8", "int4"]


def test_codecs_by_name() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        row = [Segment(300, 256), Segment(7, None), Segment(5, 128, offset=9)]
        assert make_codec("none", dtype, row).parts == (Part(312, CastFormat(dtype)),)
        assert make_codec("bf16", dtype, row).parts == (Part(312, CastFormat(torch.bfloat16)),)
        assert make_codec("int4", dtype, row).parts == (
            Part(300, BlockFormat(bits=4, block_size=256)),
            Part(7, CastFormat(dtype)),
            Part(5, BlockFormat(bits=4, block_size=128), offset=9),
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.int32])
def test_other_dtypes_are_sent_unchanged(name: Any, dtype: torch.dtype) -> None:
    codec = make_codec(name, dtype, [Segment(37, 128)])
    x = torch.randint(0, 255, (3, 37)).to(dtype)
    encoded = torch.empty(3, codec.row_bytes, dtype=torch.uint8)
    codec.encode(x, encoded)
    out = torch.empty_like(x)
    codec.decode(encoded, out)
    assert torch.equal(out, x)


@given(
    st.sampled_from(NAMES),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(1, 300),
    st.permutations(range(4)),
)
def test_encode_and_decode_with_the_same_order_put_rows_back(
    name: Any, dtype: torch.dtype, numel: int, order: list[int]
) -> None:
    codec = make_codec(name, dtype, [Segment(numel, 32)])
    assert codec.row_bytes % 16 == 0
    x = torch.randn(4, numel).to(dtype)
    encoded = torch.empty(4, codec.row_bytes, dtype=torch.uint8)
    codec.encode(x, encoded, order)
    out = torch.empty_like(x)
    codec.decode(encoded, out, order)
    largest = {"none": 0.0, "bf16": 2.0**-8, "int8": 0.01, "int4": 0.15}[name]
    assert (out.float() - x.float()).abs().max() <= largest * x.float().abs().max()
    alone = torch.empty(1, codec.row_bytes, dtype=torch.uint8)
    codec.encode(x[order[2] : order[2] + 1], alone)
    assert torch.equal(alone[0], encoded[2])


INTEGERS = st.sampled_from(["int8", "int4"])
BLOCK_SIZES = st.sampled_from([None, 64, 128])
SEGMENT = st.builds(Segment, st.integers(1, 200), BLOCK_SIZES, st.booleans(), st.integers(0, 500))
SEGMENTS = st.lists(SEGMENT, min_size=1, max_size=4)


@given(INTEGERS, INTEGERS, st.booleans(), st.booleans(), SEGMENTS, st.permutations(range(3)))
def test_each_segment_of_a_row_is_what_it_would_be_alone(
    name: Any, into_name: Any, rotate: bool, stochastic: bool, segments: list[Segment], order: list[int]
) -> None:
    """To the last bit, in every operation; the bytes of segments follow one another."""
    numel, dtype, seed = sum(segment.numel for segment in segments), torch.float32, 5
    codec, second = (make_codec(wire, dtype, segments, rotate, stochastic) for wire in (name, into_name))
    x = torch.randn(2, 3, numel)
    encoded = torch.stack([_encode(codec, rows, order, seed) for rows in x])
    decoded, total = torch.empty(3, numel), torch.ones(3, numel)
    codec.decode(encoded[0], decoded, order)
    codec.decode_sum(encoded, total, 0.5, accumulate=True)
    recoded = torch.empty(3, second.row_bytes, dtype=torch.uint8)
    codec.recode(encoded, second, recoded, 0.5, seed)
    column = 0
    for segment in segments:
        at = slice(column, column + segment.numel)
        column = at.stop
        fmt, into = (_format(wire, segment, rotate, stochastic) for wire in (name, into_name))
        alone: Any = cast if segment.block_size is None else reference
        part = torch.empty(2, 3, fmt.row_bytes(segment.numel), dtype=torch.uint8)
        for rows, row in zip(x, part, strict=True):
            alone.encode(fmt, rows[:, at], row, order, seed, segment.offset)
        assert torch.equal(encoded[..., : part.shape[-1]], part)
        encoded = encoded[..., part.shape[-1] :]
        decoded_alone, total_alone = torch.empty(3, segment.numel), torch.ones(3, segment.numel)
        alone.decode(fmt, part[0], decoded_alone, order)
        alone.decode_sum(fmt, part, total_alone, 0.5, accumulate=True)
        assert torch.equal(decoded[:, at], decoded_alone)
        assert torch.equal(total[:, at], total_alone)
        recoded_alone = torch.empty(3, into.row_bytes(segment.numel), dtype=torch.uint8)
        alone.recode(fmt, part, into, recoded_alone, segment.numel, 0.5, seed, segment.offset)
        assert torch.equal(recoded[:, : recoded_alone.shape[1]], recoded_alone)
        recoded = recoded[:, recoded_alone.shape[1] :]
    assert encoded.shape[-1] == recoded.shape[1] == column - numel == 0


def _format(name: str, segment: Segment, rotate: bool, stochastic: bool) -> BlockFormat | CastFormat:
    if segment.block_size is None:
        return CastFormat(torch.float32)
    bits = 8 if name == "int8" else 4
    return BlockFormat(bits, segment.block_size, rotate and segment.is_rotated, stochastic)


def _encode(codec: Codec, x: Tensor, order: list[int], seed: int) -> Tensor:
    encoded = torch.full((len(x), codec.row_bytes), 255, dtype=torch.uint8)
    codec.encode(x, encoded, order, seed)
    return encoded


def test_rows_that_segments_do_not_fill_are_refused() -> None:
    codec = make_codec("int8", torch.float32, [Segment(40, 32)])
    with pytest.raises(ValueError, match="a row has 41 elements; its segments have 40"):
        codec.encode(torch.zeros(2, 41), torch.empty(2, codec.row_bytes, dtype=torch.uint8))


@given(st.sampled_from(NAMES), st.integers(1, 300), st.integers(1, 4))
def test_decode_sum_in_fp32(name: Any, numel: int, senders: int) -> None:
    codec = make_codec(name, torch.bfloat16, [Segment(numel, 32)])
    x = torch.randn(senders, 2, numel).bfloat16()
    encoded = torch.stack([torch.empty(2, codec.row_bytes, dtype=torch.uint8) for _ in range(senders)])
    decoded = torch.empty(senders, 2, numel)
    for k in range(senders):
        codec.encode(x[k], encoded[k])
        codec.decode(encoded[k], decoded[k])
    out = torch.empty(2, numel)
    codec.decode_sum(encoded, out, 0.5)
    torch.testing.assert_close(out, decoded.sum(0) * 0.5, rtol=1e-6, atol=1e-6)
    codec.decode_sum(encoded, out, 0.5, accumulate=True)
    torch.testing.assert_close(out, decoded.sum(0), rtol=1e-6, atol=1e-6)
