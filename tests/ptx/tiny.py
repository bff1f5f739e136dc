"""Tiny kernels in PTX: one warp or more, one tensor of words that they write, one that they read."""

from __future__ import annotations

import torch

from .machine import Launch, run
from .memory import GlobalMemory
from .parse import parse

TEMPLATE = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry tiny(
    .param .u64 .ptr .global .align 1 tiny_param_0,
    .param .u64 .ptr .global .align 1 tiny_param_1
)
.reqntid {threads}
{{
    .reg .pred %p<8>;
    .reg .b16 %rs<8>;
    .reg .b32 %r<32>;
    .reg .b64 %rd<32>;
    ld.param.b64 %rd1, [tiny_param_0];
    ld.param.b64 %rd2, [tiny_param_1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd5, %r1, 4;
    add.s64 %rd3, %rd1, %rd5;       // this thread's word of the source
    add.s64 %rd4, %rd2, %rd5;       // and of the result
    shl.b32 %r3, %r1, 2;
    mov.b32 %r2, smem;
    add.s32 %r2, %r2, %r3;          // and of shared memory
{body}
    ret;
}}
"""


def execute(
    body: str,
    source: list[int] | torch.Tensor | None = None,
    threads: int = 32,
    programs: int = 1,
    words: int | None = None,
    shared_bytes: int = 1024,
) -> list[int]:
    """Run a body; return the result's words, as unsigned numbers. All of them are 0 before."""
    given = torch.zeros(threads, dtype=torch.int32)
    if isinstance(source, torch.Tensor):
        given = source
    elif source is not None:
        given = torch.tensor([to_signed(word) for word in source], dtype=torch.int32)
    result = torch.zeros(threads if words is None else words, dtype=torch.int32)
    launch = Launch(
        kernel=parse(TEMPLATE.format(threads=threads, body=body)),
        grid=(programs, 1, 1),
        arguments=(given.data_ptr(), result.data_ptr()),
        memory=GlobalMemory([given, result]),
        shared_bytes=shared_bytes,
    )
    run(launch)
    return [word & 0xFFFFFFFF for word in result.tolist()]


def to_signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


REGISTERS = {1: "%p{}", 16: "%rs{}", 32: "%r{}", 64: "%rd{}"}
STORES = {
    1: "selp.b32 %r20, 1, 0, %p1; @%p7 st.global.b32 [%rd20], %r20;",
    16: "cvt.u32.u16 %r20, %rs1; @%p7 st.global.b32 [%rd20], %r20;",
    32: "@%p7 st.global.b32 [%rd20], %r1;",
    64: "@%p7 st.global.b64 [%rd20], %rd1;",
}


def compute(opcode: str, result_bits: int, *operands: tuple[int, int]) -> int:
    """The result of one instruction on operands (bits, value). A predicate's is 0 or 1."""
    names = [REGISTERS[bits].format(number) for number, (bits, _) in enumerate(operands, 2)]
    moves = [f"mov.b{bits} {name}, {value};" for name, (bits, value) in zip(names, operands, strict=True)]
    body = [
        "setp.eq.s32 %p7, %r1, 0;",  # one thread writes
        "mov.b64 %rd20, %rd2;",
        *moves,
        f"{opcode} {REGISTERS[result_bits].format(1)}, {', '.join(names)};",
        STORES[result_bits],
    ]
    low, high = execute("\n".join(body), words=2)
    return low | high << 32
