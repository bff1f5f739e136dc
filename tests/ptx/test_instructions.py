"""Each family of instructions, in tiny kernels whose results are known: from PTX's manual, or by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .errors import UnknownInstructionError
from .operations import FAMILIES, find_operation
from .steps import STEPS
from .tiny import TEMPLATE, compute, execute

ONE, TWO, THREE, HALF = 0x3F800000, 0x40000000, 0x40400000, 0x3F000000
INF, NAN, PAYLOAD, LARGEST = 0x7F800000, 0x7FFFFFFF, 0x7FC00001, 0x7F7FFFFF
ZERO, NEGATIVE_ZERO, TINY, SMALLEST_NORMAL = 0, 0x80000000, 0x00000001, 0x00800000
ALL_32, ALL_64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF

# opcode, bits of the operands and of the result, then operands and results
KNOWN = [
    ("add.s32", (32, 32), 32, [(ALL_32, 2, 1)]),
    ("sub.s64", (64, 64), 64, [(1, 2, ALL_64)]),
    ("mul.lo.s32", (32, 32), 32, [(0x10001, 0x10001, 0x20001)]),
    ("mad.lo.s64", (64, 64, 64), 64, [(1 << 40, 3, 5, (3 << 40) + 5)]),
    ("mul.wide.u32", (32, 32), 64, [(ALL_32, 2, 0x1FFFFFFFE)]),
    ("mul.wide.s32", (32, 32), 64, [(ALL_32, 2, ALL_64 - 1)]),
    ("mad.wide.u32", (32, 32, 64), 64, [(ALL_32, 1, 1, 1 << 32)]),
    ("min.s64", (64, 64), 64, [(ALL_64, 5, ALL_64)]),
    ("min.u32", (32, 32), 32, [(ALL_32, 5, 5)]),
    ("max.u32", (32, 32), 32, [(ALL_32, 5, ALL_32)]),
    ("max.s32", (32, 32), 32, [(ALL_32, 5, 5)]),
    ("neg.s32", (32,), 32, [(1, ALL_32)]),
    ("abs.s32", (32,), 32, [(ALL_32, 1)]),
    ("setp.lt.s32", (32, 32), 1, [(ALL_32, 0, 1), (0, 0, 0)]),
    ("setp.lt.u32", (32, 32), 1, [(ALL_32, 0, 0), (0, 1, 1)]),
    ("setp.ne.b64", (64, 64), 1, [(1 << 40, 0, 1), (7, 7, 0)]),
    ("and.b32", (32, 32), 32, [(0xF0F0, 0xFF00, 0xF000)]),
    ("or.b64", (64, 64), 64, [(1 << 40, 1, (1 << 40) + 1)]),
    ("xor.b16", (16, 16), 16, [(0xFFFF, 0x00FF, 0xFF00)]),
    ("not.b32", (32,), 32, [(0xFFFF, 0xFFFF0000)]),
    ("shl.b32", (32, 32), 32, [(1, 31, 1 << 31), (1, 32, 0)]),
    ("shr.u64", (64, 32), 64, [(1 << 63, 63, 1), (1 << 63, 64, 0)]),
    ("shr.s32", (32, 32), 32, [(1 << 31, 4, 0xF8000000), (1 << 31, 40, ALL_32)]),
    ("shf.l.wrap.b32", (32, 32, 32), 32, [(0x12345678, 0x9ABCDEF0, 8, 0xBCDEF012)]),
    ("shf.r.wrap.b32", (32, 32, 32), 32, [(0x12345678, 0x9ABCDEF0, 40, 0xF0123456)]),
    ("bfe.u32", (32, 32, 32), 32, [(0xABCD1234, 8, 8, 0x12), (0xF0000000, 28, 8, 0xF), (1, 0, 0, 0)]),
    ("bfe.s32", (32, 32, 32), 32, [(0xFF00, 8, 8, ALL_32), (0xF0000000, 28, 8, ALL_32), (0x70, 4, 4, 7)]),
    ("bfe.u64", (64, 32, 32), 64, [(0xAB << 40, 40, 4, 0xB), (ALL_64, 0, 64, ALL_64), (ALL_64, 60, 8, 0xF)]),
    ("bfe.s64", (64, 32, 32), 64, [(0xAB << 40, 40, 8, ALL_64 - 0x54), (1 << 63, 70, 8, ALL_64)]),
    ("prmt.b32", (32, 32, 32), 32, [(0x03020100, 0x07060504, 0x7530, 0x07050300), (0x80, 0, 8, 0x808080FF)]),
    ("lop3.b32", (32, 32, 32, 32), 32, [(0b1100, 0b1010, 0b0110, 0x96, 0), (12, 10, 6, 0xCA, 0b1010)]),
    # Sums: ties to even, subnormals kept, zeros with their sign, one NaN.
    ("add.rn.f32", (32, 32), 32, [
        (ONE, 0x33800000, ONE), (0x3F800001, 0x33800000, 0x3F800002), (TINY, TINY, 2),
        (NEGATIVE_ZERO, NEGATIVE_ZERO, NEGATIVE_ZERO), (ZERO, NEGATIVE_ZERO, ZERO),
        (INF, 0xFF800000, NAN), (PAYLOAD, ONE, NAN), (LARGEST, LARGEST, INF),
    ]),
    ("add.rn.ftz.f32", (32, 32), 32, [(TINY, TINY, 0), (0x80000001, NEGATIVE_ZERO, NEGATIVE_ZERO)]),
    ("sub.rn.f32", (32, 32), 32, [(SMALLEST_NORMAL, TINY, 0x007FFFFF), (ONE, ONE, ZERO)]),
    ("mul.rn.f32", (32, 32), 32, [
        (SMALLEST_NORMAL, HALF, 0x00400000), (TINY, HALF, 0), (3, HALF, 2), (INF, ZERO, NAN),
        (NEGATIVE_ZERO, ONE, NEGATIVE_ZERO),
    ]),
    ("mul.rn.ftz.f32", (32, 32), 32, [(0x80800000, HALF, NEGATIVE_ZERO)]),
    ("div.rn.f32", (32, 32), 32, [
        (ONE, THREE, 0x3EAAAAAB), (ONE, ZERO, INF), (ZERO, ZERO, NAN), (ONE, 0x7F000000, 0x00400000),
    ]),
    ("add.rn.f32x2", (64, 64), 64, [(ONE << 32 | TINY, ONE << 32 | TINY, TWO << 32 | 2)]),
    ("sub.rn.f32x2", (64, 64), 64, [(THREE << 32 | ONE, ONE << 32 | ONE, TWO << 32)]),
    ("mul.rn.f32x2", (64, 64), 64, [(TWO << 32 | 3, HALF << 32 | HALF, ONE << 32 | 2)]),
    ("sub.rn.f32.f16", (16, 32), 32, [(0x3C00, TWO, 0xBF800000), (0x0001, ZERO, 0x33800000)]),
    ("add.rn.f32.bf16", (16, 32), 32, [(0x3F80, ONE, TWO), (0x0001, ZERO, 0x00010000)]),
    ("min.f32", (32, 32), 32, [
        (ZERO, NEGATIVE_ZERO, NEGATIVE_ZERO), (PAYLOAD, ONE, ONE), (PAYLOAD, PAYLOAD, NAN),
    ]),
    ("max.f32", (32, 32), 32, [(NEGATIVE_ZERO, ZERO, ZERO), (0xBF800000, TINY, TINY), (ONE, PAYLOAD, ONE)]),
    ("max.NaN.f32", (32, 32), 32, [(ONE, PAYLOAD, NAN)]),
    ("neg.f32", (32,), 32, [(ZERO, NEGATIVE_ZERO)]),
    ("abs.f32", (32,), 32, [(0xBF800000, ONE)]),
    ("setp.gt.f32", (32, 32), 1, [(TWO, ONE, 1), (PAYLOAD, ONE, 0), (ZERO, NEGATIVE_ZERO, 0)]),
    ("setp.ne.f32", (32, 32), 1, [(PAYLOAD, PAYLOAD, 0), (ONE, TWO, 1)]),
    ("setp.neu.f32", (32, 32), 1, [(PAYLOAD, PAYLOAD, 1), (ZERO, NEGATIVE_ZERO, 0)]),
    ("setp.nan.f32", (32, 32), 1, [(PAYLOAD, ONE, 1), (INF, ONE, 0)]),
    # Conversions.
    ("cvt.u32.u16", (16,), 32, [(0xFFFF, 0xFFFF)]),
    ("cvt.s64.s32", (32,), 64, [(ALL_32, ALL_64)]),
    ("cvt.u32.u64", (64,), 32, [(0x1234567890, 0x34567890)]),
    ("cvt.s32.s8", (32,), 32, [(0x1F0, 0xFFFFFFF0)]),
    ("cvt.rn.f32.s32", (32,), 32, [(16777217, 0x4B800000), (ALL_32, 0xBF800000)]),
    ("cvt.rn.f32.u32", (32,), 32, [(ALL_32, 0x4F800000)]),
    ("cvt.f32.f16", (16,), 32, [(0x0001, 0x33800000), (0x7C00, INF), (0x7E01, NAN), (0x8000, NEGATIVE_ZERO)]),
    ("cvt.f32.bf16", (16,), 32, [(0x3F81, 0x3F810000), (0x7FC1, NAN)]),
    ("cvt.rn.f16.f32", (32,), 16, [
        (0x477FEFFF, 0x7BFF), (0x477FF000, 0x7C00), (0x33000000, 0), (0x33000001, 1), (PAYLOAD, 0x7FFF),
        (NEGATIVE_ZERO, 0x8000),
    ]),
    ("cvt.rn.bf16.f32", (32,), 16, [
        (0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (LARGEST, 0x7F80), (0x7F800001, 0x7FFF), (TINY, 0),
    ]),
    ("cvt.rz.bf16.f32", (32,), 16, [(0x3F81FFFF, 0x3F81), (LARGEST, 0x7F7F), (0x7F800001, 0x7FFF)]),
    ("cvt.rn.f16x2.f32", (32, 32), 32, [(ONE, TWO, 0x3C004000)]),
    ("cvt.rn.bf16x2.f32", (32, 32), 32, [(ONE, TWO, 0x3F804000)]),
]  # fmt: skip


@pytest.mark.parametrize(("opcode", "sources", "result", "examples"), KNOWN, ids=lambda x: str(x)[:24])
def test_known_results(
    opcode: str, sources: tuple[int, ...], result: int, examples: list[tuple[int, ...]]
) -> None:
    for *operands, expected in examples:
        found = compute(opcode, result, *zip(sources, operands, strict=True))
        assert found == expected, f"{opcode} {[hex(x) for x in operands]}: {found:#x}, expected {expected:#x}"


def test_every_family_has_a_known_result() -> None:
    without = [
        pattern.pattern
        for pattern, _ in FAMILIES
        if not any(pattern.fullmatch(opcode) for opcode, *_ in KNOWN)
    ]
    assert without == []
    assert all(find_operation(opcode) for opcode, *_ in KNOWN)


@pytest.mark.parametrize(
    "opcode",
    [
        *("rcp.approx.f32", "ex2.approx.ftz.f32", "div.full.f32", "div.approx.f32", "sqrt.rn.f32"),
        *("add.f32", "fma.rn.f32", "add.rz.f32", "cvt.rz.f16.f32", "add.rn.sat.f32", "mul.hi.u32"),
        *("ld.volatile.global.b32", "atom.global.add.u32", "cp.async.cg.shared.global", "bar.warp.sync"),
    ],
)
def test_what_is_not_exact_or_not_known_is_an_error(opcode: str) -> None:
    with pytest.raises(UnknownInstructionError, match="is not known"):
        execute(f"{opcode} %r5, %r6, %r7;")


# Moves, memory, warps: what the word of each thread becomes.

STORE = "st.global.b32 [%rd4], %r9;"
LOAD = "ld.global.b32 %r4, [%rd3];"
LANES = list(range(32))


def test_select_and_predicate() -> None:
    body = "setp.lt.s32 %p1, %r1, 2; selp.b32 %r9, 7, 8, %p1; @!%p1 add.s32 %r9, %r9, 1;" + STORE
    assert execute(body)[:4] == [7, 7, 9, 9]


def test_pack_and_unpack() -> None:
    body = (
        "mov.b32 %r4, 0x11112222; mov.b32 {%rs1, %rs2}, %r4; mov.b32 %r5, {%rs2, %rs1};"
        "mov.b64 %rd6, {%r4, %r5}; mov.b64 {_, %r9}, %rd6;" + STORE
    )
    assert execute(body)[0] == 0x22221111


def test_a_loop() -> None:
    body = (
        "mov.b32 %r9, 0; mov.b32 %r8, 3; $L_1: add.s32 %r9, %r9, %r8; add.s32 %r8, %r8, -1;"
        "setp.ne.b32 %p1, %r8, 0; @%p1 bra $L_1;" + STORE
    )
    assert execute(body)[0] == 6


def test_vector_loads_and_stores() -> None:
    body = (
        "shl.b32 %r5, %r1, 4; cvt.u64.u32 %rd6, %r5; add.s64 %rd7, %rd1, %rd6; add.s64 %rd8, %rd2, %rd6;"
        "setp.lt.s32 %p1, %r1, 8;"
        "@%p1 ld.global.v4.b32 {%r6, %r7, %r8, %r9}, [%rd7+0];"
        "@%p1 st.global.v4.b32 [%rd8+0], {%r9, %r8, %r7, %r6};"
    )
    assert execute(body, LANES)[:8] == [3, 2, 1, 0, 7, 6, 5, 4]


def test_narrow_loads_extend() -> None:
    body = "ld.global.s8 %r9, [%rd3]; ld.global.u8 %r8, [%rd3]; add.s32 %r9, %r9, %r8;" + STORE
    assert execute(body, [0xFE] * 32)[0] == 0xFC  # -2 + 254


def test_part_of_a_parameter() -> None:
    body = "ld.param.b32 %r8, [tiny_param_0]; ld.param.b32 %r9, [tiny_param_0+4]; mov.b64 %rd9, {%r8, %r9};"
    assert (
        execute(body + "sub.s64 %rd9, %rd9, %rd1; cvt.u32.u64 %r9, %rd9; add.s32 %r9, %r9, 5;" + STORE)[0]
        == 5
    )


def test_programs() -> None:
    body = "mov.u32 %r8, %ctaid.x; mul.wide.u32 %rd6, %r8, 128; add.s64 %rd4, %rd4, %rd6; mov.b32 %r9, %r8;"
    assert execute(body + STORE, programs=3, words=96)[::32] == [0, 1, 2]


@pytest.mark.parametrize(
    ("shuffle", "expected"),
    [
        ("bfly.b32 %r9, %r1, 1, 31, -1", [1, 0, 3, 2]),
        ("up.b32 %r9, %r1, 1, 0, -1", [0, 0, 1, 2]),
        ("down.b32 %r9, %r1, 2, 31, -1", [2, 3, 4, 5]),
        ("idx.b32 %r9, %r1, 3, 31, -1", [3, 3, 3, 3]),
        ("bfly.b32 %r9, %r1, 2, 0x1e01, -1", [0, 1, 0, 1]),  # lanes beyond a segment of two stay
    ],
)
def test_shuffles(shuffle: str, expected: list[int]) -> None:
    assert execute(f"shfl.sync.{shuffle};" + STORE)[:4] == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("max.u32", ALL_32), ("max.s32", 31), ("add.s32", 31 * 31 - 1 - 2), ("or.b32", ALL_32)],
)
def test_warp_reductions(name: str, expected: int) -> None:
    """Reduce the lanes' numbers, with -1 in the place of 0; a second warp has its own result."""
    name = name.replace("b32", "u32")
    body = f"{LOAD} redux.sync.{name} %r9, %r4, -1;" + STORE
    words = [ALL_32, *LANES[1:]]
    if name == "add.s32":
        expected = sum(LANES) - 1
    result = execute(body, [*words, *[5] * 32], threads=64)
    assert set(result[:32]) == {expected}
    assert set(result[32:]) == {160 if name == "add.s32" else 5}


def test_shared_memory_with_a_barrier() -> None:
    """Every thread of two warps reads the word of its neighbor 63 - t."""
    body = (
        "st.shared.b32 [%r2], %r1; bar.sync 0; mov.b32 %r5, smem; sub.s32 %r6, 63, %r1; shl.b32 %r6, %r6, 2;"
        "add.s32 %r5, %r5, %r6; ld.shared.b32 %r9, [%r5];" + STORE
    )
    assert execute(body, threads=64) == list(range(63, -1, -1))


# A matrix of 8 rows of 8 halves. Row i has the words 4 i to 4 i + 3; word w has the halves 2 w and 2 w + 1.
FILL = "shl.b32 %r5, %r1, 17; shl.b32 %r6, %r1, 1; or.b32 %r5, %r5, %r6; add.s32 %r5, %r5, 0x10000;"
ROWS = "and.b32 %r7, %r1, 7; shl.b32 %r7, %r7, 4; mov.b32 %r8, smem; add.s32 %r7, %r7, %r8;"


def words_of_matrix() -> list[int]:
    return [(2 * word + 1) << 16 | 2 * word for word in range(32)]


def transposed_words() -> list[int]:
    """Lane t has elements 2 (t % 4) and the next one of column t / 4."""
    return [8 * (2 * (t % 4) + 1) + t // 4 << 16 | 8 * 2 * (t % 4) + t // 4 for t in range(32)]


@pytest.mark.parametrize(
    ("transposed", "expected"), [("", words_of_matrix()), (".trans", transposed_words())]
)
def test_load_matrix(transposed: str, expected: list[int]) -> None:
    body = (
        f"{FILL} st.shared.b32 [%r2], %r5; bar.sync 0; {ROWS}"
        f"ldmatrix.sync.aligned.m8n8.x1{transposed}.shared.b16 {{%r9}}, [%r7];" + STORE
    )
    assert execute(body) == expected


@pytest.mark.parametrize(
    ("transposed", "expected"), [("", words_of_matrix()), (".trans", transposed_words())]
)
def test_store_matrix(transposed: str, expected: list[int]) -> None:
    body = (
        f"{FILL} {ROWS} stmatrix.sync.aligned.m8n8.x1{transposed}.shared.b16 [%r7], {{%r5}};"
        "bar.sync 0; ld.shared.b32 %r9, [%r2];" + STORE
    )
    assert execute(body) == expected


def test_four_matrices() -> None:
    """Lanes 8 i .. 8 i + 7 name the rows of matrix i: each one is written from its own register."""
    body = (
        "mov.b32 %r10, 0; mov.b32 %r11, 1; mov.b32 %r12, 2; mov.b32 %r13, 3;"
        "shl.b32 %r7, %r1, 4; mov.b32 %r8, smem; add.s32 %r7, %r7, %r8;"
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r7], {%r10, %r11, %r12, %r13}; bar.sync 0;"
        "shl.b32 %r6, %r3, 2; add.s32 %r6, %r6, %r8; ld.shared.b32 %r9, [%r6];" + STORE
    )
    assert execute(body)[::8] == [0, 1, 2, 3]


def test_every_step_is_used_above() -> None:
    source = Path(__file__).read_text() + TEMPLATE
    names = {re.split(r"[\\(]", pattern.pattern)[0] for pattern, _ in STEPS}
    assert [name for name in names if not re.search(rf"\b{name}\b", source)] == []
