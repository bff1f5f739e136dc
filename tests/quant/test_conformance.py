"""Every implementation of the block formats against the plain torch reference, bit for bit.

Add an implementation to IMPLEMENTATIONS, and all of these tests run with it. Buffers are views at odd offsets
with gaps between rows. Whole buffers are compared, so a write outside of the view is found, too.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from zeropp.quant import reference
from zeropp.quant.cpu import launch as cpu
from zeropp.quant.formats import BlockFormat

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Implementation:
    name: str
    module: ModuleType
    max_examples: int
    """Per test. Lower it for a slow implementation."""
    max_numel: int
    """Elements of a row."""
    max_rows: int = 5
    option_examples: int = 12
    """Examples for formats that rotate or round at random, which share most of the code with the others."""
    shares_work: bool = False
    """Whether threads share long rows."""

    def examples(self, option: str) -> int:
        return min(self.option_examples, self.max_examples) if option else self.max_examples


IMPLEMENTATIONS = [Implementation("cpu", cpu, max_examples=40, max_numel=10_000, shares_work=True)]

BIT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
AWKWARD_SIZES = (0, 1, 2, 31, 32, 33, 97, 127, 128, 129, 255, 256, 257, 1021, 4095, 4096, 4097, 8191)
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
OPTIONS = {
    "": {},
    "rotated": {"rotate": True},
    "stochastic": {"stochastic": True},
    "rotated, stochastic": {"rotate": True, "stochastic": True},
}


@dataclass(frozen=True)
class Case:
    implementation: Implementation
    fmt: BlockFormat
    rows: int
    numel: int
    seed: int
    """Seed of the values. hypothesis chooses shapes, and torch fills them, which is faster."""
    gap: int
    """Elements before the first row and after each row."""
    order: list[int] | None
    offset: int = 0

    @property
    def noise(self) -> dict[str, int]:
        return {"seed": self.seed, "offset": self.offset}


@st.composite
def formats(draw: st.DrawFn, bits: int, option: str) -> BlockFormat:
    """Formats of every block size that the option allows."""
    sizes = BLOCK_SIZES[1:] if "rotated" in option else BLOCK_SIZES
    return BlockFormat(bits, draw(st.sampled_from(sizes)), **OPTIONS[option])


@st.composite
def cases(draw: st.DrawFn, implementation: Implementation, bits: int, option: str) -> Case:
    sizes = st.sampled_from(AWKWARD_SIZES) | st.integers(0, implementation.max_numel)
    rows = draw(st.integers(1, implementation.max_rows))
    return Case(
        implementation=implementation,
        fmt=draw(formats(bits, option)),
        rows=rows,
        numel=min(draw(sizes), implementation.max_numel),
        seed=draw(st.integers(0, 2**16)),
        gap=draw(st.sampled_from((0, 1, 3, 16))),
        order=draw(st.none() | st.permutations(range(rows))),
        offset=draw(st.sampled_from((0, 4096, 2**32 - 64))),
    )


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda implementation: str(implementation.name))
def implementation(request: pytest.FixtureRequest) -> Implementation:
    assert isinstance(request.param, Implementation)
    return request.param


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_encode(implementation: Implementation, bits: int, dtype: torch.dtype, option: str) -> None:
    @examples(implementation.examples(option))
    @given(cases(implementation, bits, option))
    def check(case: Case) -> None:
        source = make_source(case, dtype)
        row_bytes = case.fmt.row_bytes(case.numel)
        expected, expected_view = make_out(case, torch.uint8, row_bytes)
        actual, actual_view = make_out(case, torch.uint8, row_bytes)
        reference.encode(case.fmt, source, expected_view, case.order, **case.noise)
        implementation.module.encode(case.fmt, source, actual_view, case.order, **case.noise)
        assert_same_bits(actual, expected)

    check()


@pytest.mark.parametrize("option", ["", "rotated"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_decode(implementation: Implementation, bits: int, dtype: torch.dtype, option: str) -> None:
    @examples(implementation.examples(option))
    @given(cases(implementation, bits, option), st.sampled_from(FLOAT_DTYPES))
    def check(case: Case, source_dtype: torch.dtype) -> None:
        encoded = make_encoded(case, source_dtype, senders=1)[0]
        expected, expected_view = make_out(case, dtype, case.numel)
        actual, actual_view = make_out(case, dtype, case.numel)
        reference.decode(case.fmt, encoded, expected_view, case.order)
        implementation.module.decode(case.fmt, encoded, actual_view, case.order)
        assert_same_bits(actual, expected)

    check()


@pytest.mark.parametrize("option", ["", "rotated"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("dtype", "accumulate"), [*((dtype, False) for dtype in FLOAT_DTYPES), (torch.float32, True)]
)
def test_decode_sum(
    implementation: Implementation, bits: int, dtype: torch.dtype, accumulate: bool, option: str
) -> None:
    @examples(implementation.examples(option))
    @given(cases(implementation, bits, option), st.integers(1, 17), factors())
    def check(case: Case, senders: int, factor: float) -> None:
        encoded = make_encoded(case, torch.float32, senders)
        expected, expected_view = make_out(case, dtype, case.numel)
        actual, actual_view = make_out(case, dtype, case.numel)
        reference.decode_sum(case.fmt, encoded, expected_view, factor, accumulate)
        implementation.module.decode_sum(case.fmt, encoded, actual_view, factor, accumulate)
        assert_same_bits(actual, expected)

    check()


@pytest.mark.parametrize(
    ("option", "into_option"),
    [
        ("", ""),
        ("rotated", "rotated"),
        ("", "rotated, stochastic"),
        ("rotated", ""),
        ("rotated", "rotated, stochastic"),
    ],
)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("into_bits", [8, 4])
def test_recode(
    implementation: Implementation, bits: int, into_bits: int, option: str, into_option: str
) -> None:
    @examples(implementation.examples(into_option))
    @given(
        cases(implementation, bits, option), formats(into_bits, into_option), st.integers(1, 17), factors()
    )
    def check(case: Case, into: BlockFormat, senders: int, factor: float) -> None:
        encoded = make_encoded(case, torch.float32, senders)
        expected, expected_view = make_out(case, torch.uint8, into.row_bytes(case.numel))
        actual, actual_view = make_out(case, torch.uint8, into.row_bytes(case.numel))
        reference.recode(case.fmt, encoded, into, expected_view, case.numel, factor, **case.noise)
        implementation.module.recode(case.fmt, encoded, into, actual_view, case.numel, factor, **case.noise)
        assert_same_bits(actual, expected)

    check()


@pytest.mark.parametrize("option", ["", "rotated, stochastic"])
def test_shares_of_threads(implementation: Implementation, option: str) -> None:
    """Four threads call at once, with rows that are long enough for two threads to share."""
    numel = 300_001
    if not implementation.shares_work:
        pytest.skip(f"{implementation.name} does not share work")
    fmt, into = BlockFormat(8, 256, **OPTIONS[option]), BlockFormat(4, 128, **OPTIONS[option])
    case = Case(implementation, fmt, rows=3, numel=numel, seed=0, gap=1, order=[1, 2, 0])
    source = make_source(case, torch.bfloat16)

    def run(module: ModuleType) -> list[Tensor]:
        encoded = torch.zeros(3, case.fmt.row_bytes(numel), dtype=torch.uint8)
        module.encode(case.fmt, source, encoded, case.order, **case.noise)
        decoded, summed = torch.zeros_like(source), torch.zeros_like(source)
        module.decode(case.fmt, encoded, decoded, case.order)
        senders = torch.stack([encoded, encoded.flip(0)])
        module.decode_sum(case.fmt, senders, summed, 0.5)
        recoded = torch.zeros(3, into.row_bytes(numel), dtype=torch.uint8)
        module.recode(case.fmt, senders, into, recoded, numel, 0.5, **case.noise)
        return [encoded, decoded, summed, recoded]

    expected = run(reference)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(run, [implementation.module] * 4))
    finally:
        torch.set_num_threads(threads)
    for result in results:
        for ours, theirs in zip(result, expected, strict=True):
            assert_same_bits(ours.flatten(), theirs.flatten())


def test_cpu_refuses_arguments_that_would_touch_other_memory() -> None:
    fmt = BlockFormat(8, 128)
    source, out = torch.zeros(2, 128), torch.zeros(2, 144, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"order is \(0, 0\); expected a permutation of the 2 rows"):
        cpu.encode(fmt, source, out, [0, 0])
    with pytest.raises(ValueError, match=r"source is torch\.float64"):
        cpu.encode(fmt, source.double(), out)
    with pytest.raises(ValueError, match=r"source is torch\.float32 with strides \(1, 2\)"):
        cpu.encode(fmt, torch.zeros(128, 2).t(), out)
    with pytest.raises(ValueError, match=r"out is torch\.uint8 of shape \(2, 128\).*expected .* \(2, 144\)"):
        cpu.encode(fmt, source, out[:, :128])
    with pytest.raises(ValueError, match=r"encoded is .* \(0, 2, 144\) .* expected .* \(1, 2, 144\)"):
        cpu.decode_sum(fmt, out.expand(0, 2, 144), source)
    cpu.encode(fmt, torch.zeros(0, 128), out[:0])
    cpu.encode(fmt, torch.zeros(2, 0), out[:, :0])


def factors() -> st.SearchStrategy[float]:
    return st.sampled_from([1.0, 0.5, 1 / 3, -2.0, 0.0, 1e-30, 1e30])


def make_source(case: Case, dtype: torch.dtype) -> Tensor:
    """Rows [rows, numel] of pieces of different kinds, each a few blocks long or shorter."""
    generator = torch.Generator().manual_seed(case.seed)
    values = torch.randn(case.rows, case.numel, generator=generator)
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    kinds = [1.0, 1e-3, 1e3, largest / 4, largest, smallest, smallest * 2**-6, 0.0]
    start = 0
    while start < case.numel:
        length = int(torch.randint(1, 700, (), generator=generator))
        row = int(torch.randint(case.rows, (), generator=generator))
        kind = int(torch.randint(len(kinds) + 4, (), generator=generator))
        piece = values[row, start : start + length]
        if kind < len(kinds):
            piece.mul_(kinds[kind]).clamp_(-largest, largest)
        elif kind == len(kinds):
            piece.copy_(piece.sign())  # ties between +m and -m
        elif kind == len(kinds) + 1:
            piece[-1] = (torch.nan, torch.inf, -torch.inf)[length % 3]
        start += length // 2 + 1
    _, view = make_out(case, dtype, case.numel)
    view.copy_(values)
    return view


def make_encoded(case: Case, source_dtype: torch.dtype, senders: int) -> Tensor:
    """Rows [senders, rows, row_bytes] from the reference. A quarter has random bytes of the last sender."""
    row_bytes = case.fmt.row_bytes(case.numel)
    generator = torch.Generator().manual_seed(case.seed)
    gap = 2 * case.gap  # the reference views scales as bf16, so they must be aligned to 2 bytes
    flat = torch.zeros(gap + senders * (case.rows * (row_bytes + gap) + gap), dtype=torch.uint8)
    strides = (case.rows * (row_bytes + gap) + gap, row_bytes + gap, 1)
    encoded = flat.as_strided((senders, case.rows, row_bytes), strides, gap)
    for sender, rows in enumerate(encoded):
        source = make_source(replace(case, seed=case.seed + sender), source_dtype)
        reference.encode(case.fmt, source, rows, None, **case.noise)
    if case.seed % 4 == 0:
        encoded[-1] = torch.randint(256, encoded[-1].shape, generator=generator).to(torch.uint8)
    return encoded


def make_out(case: Case, dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor]:
    """A buffer of random content, and the view [rows, width] between its gaps."""
    gap = case.gap * (2 if dtype == torch.uint8 else 1)
    generator = torch.Generator().manual_seed(case.seed)
    numel = gap + case.rows * (width + gap)
    if dtype == torch.uint8:
        flat = torch.randint(256, (numel,), generator=generator).to(dtype)
    else:
        flat = torch.randn(numel, generator=generator).to(dtype)
    return flat, flat.as_strided((case.rows, width), (width + gap, 1), gap)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Compare bits, except the payload of NaN."""
    if actual.is_floating_point():
        assert torch.equal(actual.isnan(), expected.isnan())
        actual, expected = actual.nan_to_num(0, torch.inf), expected.nan_to_num(0, torch.inf)
    bits = BIT_TYPES[actual.itemsize]
    different = (actual.view(bits) != expected.view(bits)).nonzero().flatten()
    assert len(different) == 0, (
        f"{len(different)} of {actual.numel()} differ, first at {int(different[0])}: "
        f"{actual[different[0]]}, expected {expected[different[0]]}"
    )
