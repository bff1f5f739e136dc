"""The CPU kernels against memory speed.

    python benchmarks/kernels.py --markdown table.md

ratio = time of a torch copy_ that reads and writes as many bytes / time of the kernel. Both times are the
best of many runs, which alternate because the machine's speed drifts. With one thread, the time is that
thread's CPU time, so other jobs on the same core do not count.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from zeropp.quant.cpu import launch as cpu
from zeropp.quant.formats import BlockFormat

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FormatName = Literal["int8", "int4", "int8 rotated", "int4 rotated", "int8 stochastic", "int4 stochastic"]
FORMATS: dict[FormatName, BlockFormat] = {
    "int8": BlockFormat(8, 256),
    "int4": BlockFormat(4, 128),
    "int8 rotated": BlockFormat(8, 256, rotate=True),
    "int4 rotated": BlockFormat(4, 128, rotate=True),
    "int8 stochastic": BlockFormat(8, 256, stochastic=True),
    "int4 stochastic": BlockFormat(4, 128, stochastic=True),
}
ROWS = 8
AVX2 = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "+ssse3,+avx2"}


@dataclass(frozen=True)
class Options:
    """Measure encode, decode, decode_sum and recode on the CPU."""

    millions: tuple[int, ...] = (1, 16, 64)
    """Elements per buffer, in units of 2^20."""
    threads: tuple[int, ...] = (1, 2)
    formats: tuple[FormatName, ...] = tuple(FORMATS)
    dtypes: tuple[Literal["fp32", "bf16", "fp16"], ...] = ("fp32", "bf16", "fp16")
    senders: tuple[int, ...] = (2, 4, 8)
    """Numbers of senders that decode_sum and recode add up."""
    rounds: int = 15
    """Runs of each operation at 64M elements; smaller buffers have more runs."""
    cpu: Literal["native", "avx2"] = "native"
    """Target of the kernels' compiler: this CPU, or one with AVX2 and without AVX-512."""
    json: Path | None = None
    """File to which the measurements are written."""
    markdown: Path | None = None
    """File to which the table is written."""


@dataclass(frozen=True)
class Group:
    """Operations on the same buffers, measured in alternation."""

    threads: int
    elements: int
    format: FormatName
    dtype: str


@dataclass(frozen=True)
class Operation:
    name: str
    moved_bytes: int
    run: Callable[[], None]


@dataclass(frozen=True)
class Measurement:
    operation: str
    format: str
    dtype: str
    elements: int
    threads: int
    kernel_ms: float
    copy_ms: float
    gigabytes_per_second: float
    ratio: float


def main(options: Options) -> None:
    if options.cpu == "avx2" and os.environ.get("NUMBA_CPU_NAME") != AVX2["NUMBA_CPU_NAME"]:
        # numba reads these variables at its import.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **AVX2})
    console = Console()
    machine = describe_machine()
    console.print(machine)
    groups = [
        Group(threads, millions << 20, format_name, dtype)
        for threads in options.threads
        for millions in options.millions
        for format_name in options.formats
        for dtype in options.dtypes
    ]
    measurements: list[Measurement] = []
    for group in track(groups, "Measuring", console=console):
        measurements += measure(group, options)
    console.print(make_table(measurements))
    if options.json:
        content = {"machine": machine, "measurements": [asdict(each) for each in measurements]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(to_markdown(machine, measurements))


def measure(group: Group, options: Options) -> Iterator[Measurement]:
    torch.set_num_threads(group.threads)
    operations = list(make_operations(group, options))
    most_bytes = max(operation.moved_bytes for operation in operations)
    source, target = torch.ones(2, most_bytes // 2, dtype=torch.uint8)
    best_kernel = [float("inf")] * len(operations)
    best_copy = list(best_kernel)
    for operation in operations:
        operation.run()  # compiles the kernel and touches every page
    for _ in range(options.rounds * min(10, max(1, (64 << 20) // group.elements))):
        for i, operation in enumerate(operations):
            half = operation.moved_bytes // 2
            best_copy[i] = min(best_copy[i], seconds(partial(target[:half].copy_, source[:half])))
            best_kernel[i] = min(best_kernel[i], seconds(operation.run))
    for operation, kernel, copy in zip(operations, best_kernel, best_copy, strict=True):
        yield Measurement(
            operation=operation.name,
            format=group.format,
            dtype=group.dtype,
            elements=group.elements,
            threads=group.threads,
            kernel_ms=kernel * 1e3,
            copy_ms=copy * 1e3,
            gigabytes_per_second=operation.moved_bytes / kernel / 1e9,
            ratio=copy / kernel,
        )


def make_operations(group: Group, options: Options) -> Iterator[Operation]:
    fmt, dtype = FORMATS[group.format], DTYPES[group.dtype]
    numel = group.elements // ROWS
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    values = torch.randn(ROWS, numel).to(dtype)
    out = torch.ones_like(values)
    encoded = torch.ones(max(options.senders), ROWS, fmt.row_bytes(numel), dtype=torch.uint8)
    for sender in encoded:
        cpu.encode(fmt, values, sender, seed=0)
    recoded = torch.ones_like(encoded[0])

    value_bytes, encoded_bytes = nbytes(values), nbytes(encoded[0])
    one_way = value_bytes + encoded_bytes
    yield Operation("encode", one_way, partial(cpu.encode, fmt, values, recoded, seed=0))
    yield Operation("encode, ordered", one_way, partial(cpu.encode, fmt, values, recoded, order, seed=0))
    yield Operation("decode", one_way, partial(cpu.decode, fmt, encoded[0], out))
    yield Operation("decode, ordered", one_way, partial(cpu.decode, fmt, encoded[0], out, order))
    for k in options.senders:
        yield Operation(
            f"decode_sum of {k}",
            k * encoded_bytes + value_bytes,
            partial(cpu.decode_sum, fmt, encoded[:k], out, 1 / 8),
        )
    if group.dtype == "fp32":  # recode never sees another dtype
        for k in options.senders:
            yield Operation(
                f"recode of {k}",
                (k + 1) * encoded_bytes,
                partial(cpu.recode, fmt, encoded[:k], fmt, recoded, numel, 1 / 8, seed=0),
            )


def seconds(run: Callable[[], object]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    return clock() - start


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def describe_machine() -> dict[str, str]:
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":")[1].strip() if names else model
    return {
        "cpu": model,
        "kernels for": os.environ.get("NUMBA_CPU_NAME", "this CPU"),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": version("numba"),
    }


def cells(measurement: Measurement) -> list[str]:
    return [
        measurement.operation,
        measurement.format,
        "-" if measurement.operation.startswith("recode") else measurement.dtype,
        f"{measurement.elements >> 20}M",
        str(measurement.threads),
        f"{measurement.kernel_ms:.2f}",
        f"{measurement.copy_ms:.2f}",
        f"{measurement.gigabytes_per_second:.1f}",
        f"{measurement.ratio:.2f}",
    ]


COLUMNS = ["operation", "format", "dtype", "elements", "threads", "kernel ms", "copy ms", "GB/s", "ratio"]


def make_table(measurements: list[Measurement]) -> Table:
    table = Table(*COLUMNS, title="CPU kernels against a copy of the same bytes")
    for measurement in measurements:
        table.add_row(*cells(measurement))
    return table


def to_markdown(machine: dict[str, str], measurements: list[Measurement]) -> str:
    lines = [
        "# CPU kernels",
        "",
        "Written by `benchmarks/kernels.py`. ratio = time of a torch `copy_` that reads and writes as many "
        "bytes / time of the kernel, best of many runs in turns.",
        "",
        ", ".join(f"{key} {value}" for key, value in machine.items()),
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(cells(measurement)) + " |" for measurement in measurements),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(tyro.cli(Options))
