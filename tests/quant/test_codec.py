from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zeropp.quant import BlockCodec, BlockFormat, CastCodec, Codec, Segment, make_codec

NAMES = ["none", "bf16", "int8", "int4"]


def test_codecs_by_name() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        none, bf16 = make_codec("none", dtype, 128), make_codec("bf16", dtype, 128)
        assert isinstance(none, CastCodec)
        assert none.wire_dtype == dtype
        assert isinstance(bf16, CastCodec)
        assert bf16.wire_dtype == torch.bfloat16
        int4 = make_codec("int4", dtype, 256)
        assert isinstance(int4, BlockCodec)
        assert int4.fmt == BlockFormat(bits=4, block_size=256)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.int32])
def test_what_cannot_be_quantized_is_sent_as_it_is(name: Any, dtype: torch.dtype) -> None:
    codec = make_codec(name, dtype, 128)
    x = torch.randint(0, 255, (3, 37)).to(dtype)
    encoded = torch.empty(3, codec.row_bytes(37), dtype=torch.uint8)
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
    codec = make_codec(name, dtype, 32)
    assert codec.row_bytes(numel) % 16 == 0
    x = torch.randn(4, numel).to(dtype)
    encoded = torch.empty(4, codec.row_bytes(numel), dtype=torch.uint8)
    codec.encode(x, encoded, order)
    out = torch.empty_like(x)
    codec.decode(encoded, out, order)
    largest = {"none": 0.0, "bf16": 2.0**-8, "int8": 0.01, "int4": 0.15}[name]
    assert (out.float() - x.float()).abs().max() <= largest * x.float().abs().max()
    alone = torch.empty(1, codec.row_bytes(numel), dtype=torch.uint8)
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
    """In every operation, to the last bit, one after the other."""
    numel, dtype, seed = sum(segment.numel for segment in segments), torch.float32, 5
    codec, second = (make_codec(wire, dtype, 128, rotate, stochastic, segments) for wire in (name, into_name))
    x = torch.randn(2, 3, numel)
    encoded = torch.stack([_encode(codec, rows, order, seed) for rows in x])
    decoded, total = torch.empty(3, numel), torch.ones(3, numel)
    codec.decode(encoded[0], decoded, order)
    codec.decode_sum(encoded, total, 0.5, accumulate=True)
    recoded = torch.empty(3, second.row_bytes(numel), dtype=torch.uint8)
    codec.recode(encoded, second, recoded, numel, 0.5, seed=seed)
    column = 0
    for segment in segments:
        at = slice(column, column + segment.numel)
        column = at.stop
        is_rotated = rotate and segment.is_rotated
        alone, second_alone = (
            CastCodec(dtype)
            if segment.block_size is None
            else BlockCodec(
                BlockFormat(8 if wire == "int8" else 4, segment.block_size, is_rotated, stochastic)
            )
            for wire in (name, into_name)
        )
        part = torch.stack([_encode(alone, rows[:, at], order, seed, segment.offset) for rows in x])
        assert torch.equal(encoded[..., : part.shape[-1]], part)
        encoded = encoded[..., part.shape[-1] :]
        decoded_alone, total_alone = torch.empty(3, segment.numel), torch.ones(3, segment.numel)
        alone.decode(part[0], decoded_alone, order)
        alone.decode_sum(part, total_alone, 0.5, accumulate=True)
        assert torch.equal(decoded[:, at], decoded_alone)
        assert torch.equal(total[:, at], total_alone)
        recoded_alone = torch.empty(3, second_alone.row_bytes(segment.numel), dtype=torch.uint8)
        alone.recode(part, second_alone, recoded_alone, segment.numel, 0.5, seed=seed, offset=segment.offset)
        assert torch.equal(recoded[:, : recoded_alone.shape[1]], recoded_alone)
        recoded = recoded[:, recoded_alone.shape[1] :]
    assert encoded.shape[-1] == recoded.shape[1] == column - numel == 0


def _encode(codec: Codec, x: Tensor, order: list[int], seed: int, offset: int = 0) -> Tensor:
    encoded = torch.full((len(x), codec.row_bytes(x.shape[1])), 255, dtype=torch.uint8)
    codec.encode(x, encoded, order, seed, offset)
    return encoded


def test_rows_that_segments_do_not_fill_are_refused() -> None:
    codec = make_codec("int8", torch.float32, 32, segments=[Segment(40, 32)])
    with pytest.raises(ValueError, match="a row has 41 elements; its segments have 40"):
        codec.row_bytes(41)


@given(st.sampled_from(NAMES), st.integers(1, 300), st.integers(1, 4))
def test_decode_sum_in_fp32(name: Any, numel: int, senders: int) -> None:
    codec = make_codec(name, torch.bfloat16, 32)
    x = torch.randn(senders, 2, numel).bfloat16()
    encoded = torch.stack([torch.empty(2, codec.row_bytes(numel), dtype=torch.uint8) for _ in range(senders)])
    decoded = torch.empty(senders, 2, numel)
    for k in range(senders):
        codec.encode(x[k], encoded[k])
        codec.decode(encoded[k], decoded[k])
    out = torch.empty(2, numel)
    codec.decode_sum(encoded, out, 0.5)
    torch.testing.assert_close(out, decoded.sum(0) * 0.5, rtol=1e-6, atol=1e-6)
    codec.decode_sum(encoded, out, 0.5, accumulate=True)
    torch.testing.assert_close(out, decoded.sum(0), rtol=1e-6, atol=1e-6)
