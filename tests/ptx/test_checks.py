"""What the interpreter refuses: each check in a tiny kernel that breaks it, and in one that does not."""

from __future__ import annotations

import pytest
import torch

from . import machine
from .errors import (
    BadAccessError,
    DivergenceError,
    PtxError,
    RaceError,
    UnknownInstructionError,
    UnwrittenValueError,
)
from .memory import Region
from .tiny import execute

STORE = "st.global.b32 [%rd4], %r9;"
FIRST_HALF = "setp.lt.s32 %p1, %r1, 16;"


def fails(body: str, error: type[PtxError], match: str, **options: object) -> None:
    with pytest.raises(error, match=match):
        execute(body, **options)  # type: ignore[arg-type]


def test_an_unwritten_value_may_not_show() -> None:
    fails(STORE, UnwrittenValueError, "stored to global memory was never written, in thread 0")
    half = FIRST_HALF + "@%p1 mov.b32 %r9, 5; add.s32 %r9, %r9, 1;"
    fails(half + STORE, UnwrittenValueError, "in thread 16")
    assert execute(half + "@%p1 " + STORE)[14:18] == [6, 6, 0, 0]
    fails(
        half + "setp.eq.s32 %p2, %r9, 6; @%p2 bra $L; $L:",
        UnwrittenValueError,
        "a predicate was never written",
    )
    fails("ld.global.b32 %r9, [%rd9];", UnwrittenValueError, "an address was never written")


def test_unwritten_values_pass_through_shuffles_shared_memory_and_pairs() -> None:
    partial = FIRST_HALF + "@%p1 mov.b32 %r8, 5;"
    fails(partial + "shfl.sync.bfly.b32 %r9, %r8, 16, 31, -1;" + STORE, UnwrittenValueError, "in thread 0")
    fails("ld.shared.b32 %r9, [%r2];" + STORE, UnwrittenValueError, "in thread 0")
    fails(partial + "st.shared.b32 [%r2], %r8; ld.shared.b32 %r9, [%r2];" + STORE, UnwrittenValueError, "16")
    pair = "mov.b32 %r8, 0; mov.b64 %rd9, {%r8, %r30}; add.rn.f32x2 %rd9, %rd9, %rd9;"
    assert execute(pair + "mov.b64 {%r9, _}, %rd9;" + STORE)[0] == 0
    fails(pair + "mov.b64 {_, %r9}, %rd9;" + STORE, UnwrittenValueError, "in thread 0")
    permute = "mov.b32 %r8, 0x11223344; prmt.b32 %r9, %r8, %r30, {};"
    assert execute(permute.format("0x0123U") + STORE)[0] == 0x44332211
    fails(permute.format("0x4123U") + STORE, UnwrittenValueError, "in thread 0")
    select = "setp.ge.s32 %p2, %r1, 0; mov.b32 %r8, 3; selp.b32 %r9, %r8, %r30, %p2;"
    assert execute(select + STORE)[0] == 3


def test_accesses_outside_the_tensors() -> None:
    fails("ld.global.b32 %r9, [%rd3+4];", BadAccessError, "4 bytes at 0x.* are not all in one tensor")
    fails("mov.b32 %r9, 0; st.global.b32 [%rd4+-4], %r9;", BadAccessError, "not all in one tensor")
    fails("mov.b64 %rd9, 0; ld.global.b32 %r9, [%rd9];", BadAccessError, "at 0x0 ")
    fails("ld.shared.b32 %r9, [%r2];", BadAccessError, "4 shared bytes at 64 of 64", shared_bytes=64)
    fails("mov.b32 %r9, 0; ld.shared.b32 %r9, [%r9];", BadAccessError, "4 shared bytes at -1024 of")


def test_gaps_between_rows_are_outside() -> None:
    buffer = torch.arange(64, dtype=torch.int32).view(2, 32)
    assert execute("ld.global.b32 %r9, [%rd3];" + STORE, buffer[:, :16].flatten())[15] == 15
    rows = buffer[:, :16]
    fails("ld.global.b32 %r9, [%rd3];", BadAccessError, "not all in one tensor", source=rows)
    row = FIRST_HALF + "@%p1 ld.global.b32 %r9, [%rd3+128]; @%p1 " + STORE
    assert execute(row, rows)[:2] == [32, 33]


def test_regions_of_views() -> None:
    flat = torch.zeros(100, dtype=torch.int16)
    region = Region.of(flat.as_strided((3, 2, 5), (30, 10, 1), 1))
    assert (region.run, region.dims, region.extent) == (10, ((60, 3), (20, 2)), 150)
    assert Region.of(flat.view(10, 10)) == Region.of(flat)
    assert Region.of(flat[:10].expand(4, 10)) == Region.of(flat[:10])


def test_misaligned_accesses() -> None:
    vector = "ld.global.v2.b32 {%r8, %r9}, [%rd3];"
    fails(vector, BadAccessError, "8 bytes of global memory at .*, no multiple of 8")
    fails("ld.shared.b16 %rs1, [%r2+1];", BadAccessError, "2 bytes of shared memory")
    matrix = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%r2];"
    fails(matrix, BadAccessError, "a multiple of 16 bytes")


WRITE = "st.shared.b32 [%r2], %r1;"
SAME = "mov.b32 %r5, smem;"
OTHER = "xor.b32 %r6, %r3, 4; mov.b32 %r5, smem; add.s32 %r5, %r5, %r6;"


def test_races_in_shared_memory() -> None:
    fails(WRITE + OTHER + "ld.shared.b32 %r9, [%r5];", RaceError, "reads .* another one wrote it")
    fails(WRITE + OTHER + "st.shared.b32 [%r5], %r1;", RaceError, "writes .* another one wrote it")
    execute(WRITE + "bar.sync 0;" + OTHER + "ld.shared.b32 %r9, [%r5];")
    fails(
        WRITE + "bar.sync 0;" + OTHER + "ld.shared.b32 %r9, [%r5];" + WRITE, RaceError, "another one read it"
    )
    fails(SAME + "st.shared.b32 [%r5], %r1;", RaceError, "different values at one shared byte")
    fails(SAME + "st.shared.b32 [%r5], 7; ld.shared.b32 %r9, [%r5];", RaceError, "another one wrote it")
    execute(SAME + "st.shared.b32 [%r5], 7; bar.sync 0; ld.shared.b32 %r9, [%r5];")


def test_races_in_global_memory() -> None:
    fails("st.global.b32 [%rd2], 7;", RaceError, "two threads write the global byte")
    fails(
        "mov.b32 %r9, 7; st.global.b32 [%rd4], %r9; ld.global.b32 %r9, [%rd2];",
        RaceError,
        "a thread reads the global byte",
    )
    execute("ld.global.b32 %r9, [%rd2]; bar.sync 0;" + STORE)
    fails("mov.b32 %r9, 7;" + STORE, RaceError, "two threads write the global byte", programs=2)
    fails(
        "ld.global.b32 %r9, [%rd2+4]; bar.sync 0; mov.u32 %r8, %ctaid.x; mul.wide.u32 %rd6, %r8, 128;"
        "add.s64 %rd4, %rd4, %rd6;" + STORE,
        RaceError,
        "a thread reads the global byte",  # of another program
        programs=2,
        words=64,
    )


def test_threads_that_part() -> None:
    fails(FIRST_HALF + "@%p1 bra $L; $L:", DivergenceError, "some threads take this branch")
    fails(FIRST_HALF + "@%p1 bar.sync 0;", DivergenceError, "some threads do not execute this")
    fails(FIRST_HALF + "@%p1 ret;", DivergenceError, "some threads do not execute this")
    fails("shfl.sync.bfly.b32 %r9, %r1, 1, 31, 1;", DivergenceError, "some lanes of a warp")


def test_endless_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MAX_STEPS", 1000)
    fails("$L: bra $L;", PtxError, "an endless loop")


def test_what_is_no_ptx_of_ours() -> None:
    fails("mov.b32 %r99, 1;", UnknownInstructionError, "register %r99 is not declared")
    fails("add.s32 %r9, %r1;", UnknownInstructionError, "1 sources; expected 2")
    fails("add.s32 %r9, %r1, %rd1;", UnknownInstructionError, "%rd1 has 64 bits; expected 32")
    fails("cvt.u64.u32 %r9, %r1;", UnknownInstructionError, "%r9 has 32 bits; the result has 64")
    fails("bra nowhere;", UnknownInstructionError, "branch to")
    fails("bar.sync 1;", UnknownInstructionError, "a barrier of some threads")
    fails(".reg .b32 %r<4>;", UnknownInstructionError, "register %r0 is declared twice")
