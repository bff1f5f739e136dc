"""Every GPU kernel, compiled ahead of time: registers, spills and load widths on each kind of GPU.

    python benchmarks/compile_gpu_kernels.py                                    # all targets
    python benchmarks/compile_gpu_kernels.py --targets sm_90 --block-sizes 128

Runs on any machine: no GPU is needed, and nothing is timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from zeropp.quant.gpu_compile import Report, TargetName, compile_all

TABLE_WIDTH = 120


@dataclass(frozen=True)
class Arguments:
    """Compile the GPU kernels for several GPUs, without one, and show registers, spills and load widths."""

    targets: tuple[TargetName, ...] = get_args(TargetName)
    """GPU architectures."""
    block_sizes: tuple[int, ...] = (128, 256)
    """Elements that share one scale."""
    name_contains: str = ""
    """Only the variants with this in their names, for example "recode"."""


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
