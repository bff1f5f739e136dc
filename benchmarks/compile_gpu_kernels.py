"""Compile every GPU kernel ahead of time: registers, spills and load widths for each GPU architecture.

    python benchmarks/compile_gpu_kernels.py                                    # all targets
    python benchmarks/compile_gpu_kernels.py --targets sm_90 --block-sizes 128

It needs no GPU and runs no kernel.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import tyro
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends.compiler import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
    GPUTarget,
)

from zeropp.quant.gpu import kernels as gpu_kernels
from zeropp.quant.gpu.bits import TILE
from zeropp.quant.gpu.launch import AMD_WARP, LAUNCH, NVIDIA_WARP, THREADS
from zeropp.quant.rotation import LARGEST_FP32

TABLE_WIDTH = 120
TargetName = Literal["sm_80", "sm_90", "sm_100", "gfx942"]
TARGETS: dict[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, NVIDIA_WARP),  # A100
    "sm_90": GPUTarget("cuda", 90, NVIDIA_WARP),  # H100, H200
    "sm_100": GPUTarget("cuda", 100, NVIDIA_WARP),  # B200
    "gfx942": GPUTarget("hip", "gfx942", AMD_WARP),  # MI300
}
SENDERS = (2, 4, 8)
LARGEST = {"fp32": LARGEST_FP32, "bf16": 3.3895313892515355e38, "fp16": 65504.0}
SCALE_BITS = 16
SASS_INSTRUCTION = r"\*/\s+(?:@!?U?P\w+\s+)?(?!NOP)[A-Z]"
AMD_VECTOR_INSTRUCTION = r"^\s+v_"
AMD_WIDTHS = {"ubyte": 8, "ushort": 16, "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}


@dataclass(frozen=True)
class Variant:
    """A kernel with its compile-time constants."""

    name: str
    kernel: Any
    pointers: Mapping[str, str]
    """Pointer arguments and their element types."""
    constants: Mapping[str, object]
    odd_rows: bool = False
    """The length of rows is not a multiple of 16, so most rows are not aligned to 16 bytes."""


@dataclass(frozen=True)
class Report:
    """The compiled code of a variant on a target. Fields are None if a tool is missing, named in
    `missing`."""

    variant: str
    target: str
    registers: int | None = None
    """Registers per thread; VGPRs on AMD."""
    spills: int | None = None
    """Bytes of stack per thread on NVIDIA, spilled registers on AMD."""
    shared_bytes: int | None = None
    load_bits: int | None = None
    """Width of the narrowest load, except for scales."""
    instructions: float | None = None
    """Machine instructions per element (on AMD: vector instructions); also None if the kernel has a loop."""
    assembly: str = field(default="", repr=False)
    """SASS or amdgcn, if there is a disassembler."""
    missing: str = ""


def compile_all(
    targets: Sequence[str] = tuple(TARGETS),
    block_sizes: Sequence[int] = (128, 256),
    name_contains: str = "",
    progress: bool = False,
) -> list[Report]:
    """Compile the variants whose names contain `name_contains`, for every target."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set, so Triton does not compile: unset it")
    chosen = [
        (variant, target)
        for target in targets
        for variant in variants(block_sizes)
        if name_contains in variant.name
    ]
    return [
        compile_variant(*pair) for pair in track(chosen, "Compiling", disable=not progress, transient=True)
    ]


def variants(block_sizes: Sequence[int]) -> Iterator[Variant]:
    for block_size in block_sizes:
        for bits in (8, 4):
            for dtype in ("fp32", "bf16", "fp16"):
                yield encode_variant(dtype, bits, block_size)
            for dtype in ("fp32", "bf16", "fp16"):
                yield decode_variant(dtype, bits, block_size)
            for senders in SENDERS:
                yield decode_variant("fp32", bits, block_size, senders, accumulate=True)
            yield decode_variant("bf16", bits, block_size, senders=4)
            for senders in SENDERS:
                yield recode_variant(bits, 4, block_size, senders)
        yield encode_variant("bf16", 8, block_size, odd_rows=True)
        yield decode_variant("bf16", 8, block_size, odd_rows=True)
        yield encode_variant("bf16", 8, block_size, rotated=True)
        yield encode_variant("bf16", 8, block_size, stochastic=True)
        yield encode_variant("fp32", 4, block_size, rotated=True, stochastic=True)
        yield decode_variant("fp32", 4, block_size, senders=4, rotated=True)
        yield recode_variant(8, 4, block_size, senders=4, rotation=1)
        yield recode_variant(8, 4, block_size, senders=4, stochastic=True)


def encode_variant(
    dtype: str,
    bits: int,
    block_size: int,
    odd_rows: bool = False,
    rotated: bool = False,
    stochastic: bool = False,
) -> Variant:
    marks = {"odd rows": odd_rows, "rotated": rotated, "stochastic": stochastic}
    return Variant(
        name=f"encode {dtype} to int{bits}, block {block_size}{_listed(marks)}",
        kernel=gpu_kernels.encode_kernel,
        pointers={"source": dtype, "out": "u8"},
        constants={
            "order": None,
            "bits": bits,
            "block_size": block_size,
            "rotated": rotated,
            "stochastic": stochastic,
            "largest": LARGEST["fp32" if rotated else dtype],
        },
        odd_rows=odd_rows,
    )


def decode_variant(
    dtype: str,
    bits: int,
    block_size: int,
    senders: int = 1,
    accumulate: bool = False,
    odd_rows: bool = False,
    rotated: bool = False,
) -> Variant:
    what = "decode" if senders == 1 else f"decode_sum{' accumulate' if accumulate else ''} k={senders}"
    marks = {"odd rows": odd_rows, "rotated": rotated}
    return Variant(
        name=f"{what} int{bits} to {dtype}, block {block_size}{_listed(marks)}",
        kernel=gpu_kernels.decode_kernel,
        pointers={"encoded": "u8", "out": dtype},
        constants={
            "order": None,
            "senders": senders,
            "bits": bits,
            "block_size": block_size,
            "rotated": rotated,
            "largest": LARGEST[dtype if rotated else "fp32"],
            "accumulate": accumulate,
        },
        odd_rows=odd_rows,
    )


def recode_variant(
    bits: int, into_bits: int, block_size: int, senders: int, rotation: int = 0, stochastic: bool = False
) -> Variant:
    marks = {"rotated": rotation == 1, "turned back": rotation == -1, "stochastic": stochastic}
    return Variant(
        name=f"recode k={senders} int{bits} to int{into_bits}, block {block_size}{_listed(marks)}",
        kernel=gpu_kernels.recode_kernel,
        pointers={"encoded": "u8", "out": "u8"},
        constants={
            "senders": senders,
            "bits": bits,
            "block_size": block_size,
            "into_bits": into_bits,
            "into_block_size": block_size,
            "rotation": rotation,
            "stochastic": stochastic,
        },
    )


def _listed(marks: Mapping[str, bool]) -> str:
    return "".join(f", {name}" for name, present in marks.items() if present)


def compile_variant(variant: Variant, target_name: str, disassemble: bool = True) -> Report:
    """Compile a variant. Without `disassemble`, a report for NVIDIA has neither instructions nor assembly,
    which take half of the time."""
    target = TARGETS[target_name]
    if target.backend == "cuda" and _tool(_ptxas(target)) is None:
        return Report(variant.name, target_name, missing=_ptxas(target))
    names: list[str] = variant.kernel.arg_names
    signature = (
        dict.fromkeys(names, "i64") | {"factor": "fp32"} | dict.fromkeys(variant.constants, "constexpr")
    )
    signature |= {name: f"*{element}" for name, element in variant.pointers.items()}
    odd = {"numel", *(f"{name}_stride" for name, element in variant.pointers.items() if element != "u8")}
    aligned = {name for name in names if signature[name] == "i64" or signature[name].startswith("*")}
    aligned -= {"seed_key", "offset"}
    if variant.odd_rows:
        aligned -= odd
    source = triton.compiler.ASTSource(
        variant.kernel,
        {name: signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = LAUNCH | {"num_warps": THREADS // target.warp_size}
    with _active(target):
        compiled = triton.compile(source, target=target, options=options)
    if target.backend == "cuda":
        return _report_nvidia(variant, target_name, compiled, disassemble)
    return _report_amd(variant, target_name, compiled)


@dataclass(frozen=True)
class _NoDevice:
    """A driver that only names a target, for kernels that look at it (`is_hip`)."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextmanager
def _active(target: GPUTarget) -> Iterator[None]:
    config = triton.runtime.driver
    before = config._active
    config.set_active(_NoDevice(target))
    try:
        yield
    finally:
        config._active = before


def _report_nvidia(variant: Variant, target: str, compiled: Any, disassemble: bool) -> Report:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _output("cuobjdump", "-res-usage", cubin.name)
        sass = _output("nvdisasm", "--print-code", cubin.name) if disassemble else ""
    stack = None if usage is None else _number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage)
    vectors = re.findall(r"\bld\.global(?:\.v(\d))?\.b(\d+)", compiled.asm["ptx"])
    missing = [name for name, text in (("cuobjdump", usage), ("nvdisasm", sass)) if text is None]
    return Report(
        variant.name,
        target,
        registers=None if usage is None else _number(r"REG:(\d+)", usage),
        spills=stack,
        shared_bytes=compiled.metadata.shared,
        load_bits=_narrowest(variant, [int(count or 1) * int(bits) for count, bits in vectors]),
        # The part marked weak is the slow path of a division, which only scales near the limits of fp32 take.
        instructions=_per_element(sass.partition(".weak")[0], SASS_INSTRUCTION) if sass else None,
        assembly=sass or "",
        missing=" and ".join(missing),
    )


def _report_amd(variant: Variant, target: str, compiled: Any) -> Report:
    assembly: str = compiled.asm["amdgcn"]
    loads = re.findall(r"^\s+(?:global|buffer|flat)_load_(u?\w+)", assembly, re.MULTILINE)
    spills = (_number(rf"\.{kind}_spill_count:\s*(\d+)", assembly) for kind in ("vgpr", "sgpr"))
    return Report(
        variant.name,
        target,
        registers=_number(r"\.vgpr_count:\s*(\d+)", assembly),
        spills=sum(spills),
        shared_bytes=compiled.metadata.shared,
        load_bits=_narrowest(variant, [AMD_WIDTHS[load] for load in loads]),
        instructions=_per_element(assembly, AMD_VECTOR_INSTRUCTION),
        assembly=assembly,
    )


def _narrowest(variant: Variant, load_widths: list[int]) -> int:
    reads_scales = "encoded" in variant.pointers
    return min(
        (bits for bits in load_widths if not (reads_scales and bits == SCALE_BITS)), default=SCALE_BITS
    )


def _per_element(assembly: str, instruction: str) -> float | None:
    """Return the instructions per element of a tile, if each thread runs each instruction once; else None."""
    labels: set[str] = set()
    count = 0
    after_label = False
    for line in assembly.splitlines():
        if label := re.match(r"\.?(L\w+):", line.strip()):
            labels.add(label[1])
            after_label = True
            continue
        branch = re.search(r"\b(?:BRA[.\w]*|s_c?branch\w*)\s.*?\.?(L\w+)", line)
        # SASS ends with a branch to itself, which is never reached.
        if branch and branch[1] in labels and not after_label:
            return None
        if re.search(instruction, line):
            count += 1
            after_label = False
    return count * THREADS / int(TILE.value)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(
            f"the compiler's output does not match {pattern!r}; adapt the pattern to this version of the tool"
        )
    return int(found[1])


def _ptxas(target: GPUTarget) -> str:
    return "ptxas_blackwell" if target.arch >= 100 else "ptxas"


def _tool(name: str) -> str | None:
    """Return the path of one of NVIDIA's tools: TRITON_..._PATH, or the copy in Triton. None if there is
    none."""
    try:
        path: str = getattr(triton.knobs.nvidia, name).path
    except RuntimeError:
        return None
    return path


def _output(tool: str, *arguments: str) -> str | None:
    path = _tool(tool)
    if path is None:
        return None
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Arguments:
    """Compile the GPU kernels for several architectures and show registers, spills and load widths."""

    targets: tuple[TargetName, ...] = get_args(TargetName)
    """GPU architectures."""
    block_sizes: tuple[int, ...] = (128, 256)
    """Elements per scale."""
    name_contains: str = ""
    """Compile only variants whose name contains this, for example "recode"."""


def main(arguments: Arguments) -> None:
    reports = compile_all(arguments.targets, arguments.block_sizes, arguments.name_contains, progress=True)
    console = Console(width=TABLE_WIDTH)
    for target in arguments.targets:
        table = Table(title=f"{target}, triton {triton.__version__}", box=box.MARKDOWN)
        table.add_column("kernel", no_wrap=True)
        for heading in ("registers", "spills", "shared bytes", "load bits", "instr/element"):
            table.add_column(heading, justify="right")
        for report in reports:
            if report.target == target:
                table.add_row(report.variant, *_cells(report))
        console.print(table)


def _cells(report: Report) -> list[str]:
    absent = f"no {report.missing}" if report.missing else ""
    counts = (report.registers, report.spills, report.shared_bytes, report.load_bits)
    cells = [absent if count is None else str(count) for count in counts]
    return [*cells, absent or "loop" if report.instructions is None else f"{report.instructions:.1f}"]


if __name__ == "__main__":
    main(tyro.cli(Arguments))
