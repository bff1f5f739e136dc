"""`zeropp plan`: predict bytes, memory and time of a training step on a described cluster."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ..atomic_files import write_file
from ..plan.catalog import find_hardware
from ..plan.chrome import write_chrome_trace
from ..plan.models import resolve
from ..plan.planning import make_plan
from ..plan.recommend import find_compared
from ..plan.result import Plan
from ..plan.scenario import Precision, Scenario
from ..plan.sweep import Axes
from ..report.plan import EXPLANATION, plan_tables
from ..report.plan_page import render_plan
from ..strategies import DEFAULT
from .options import read_options
from .output import check_files, print_sentences, table_console


@dataclass(frozen=True)
class Numbers:
    """Values that replace those of the named hardware."""

    peak_tflops: float | None = None
    """Peak of one rank, in the dtype of the matrix products."""
    compute_share: float | None = None
    """Share of the peak that matrix products reach: 0 to 1."""
    memory_gib: float | None = None
    """Memory of a rank."""
    memory_gbyte_s: float | None = None
    """Rate of a rank's memory."""
    in_node_gbyte_s: float | None = None
    """Rate from one rank to the others of its node."""
    in_node_latency_us: float | None = None
    link_gbit_s: float | None = None
    """Rate from one node to the others, in each direction."""
    link_latency_us: float | None = None


@dataclass(frozen=True)
class Options:
    """Predict time, bytes and memory of a training step, without the cluster.

    This runs the code of FSDP2 and zeropp in one process, without data and other ranks, and then schedules
    the recorded step on the hardware.

        zeropp plan --model 18B --nodes 24 --hardware v100-dgx2-100g --recommend
        torchrun --nnodes 2 --nproc-per-node 8 ... -m zeropp doctor --hardware mine.json
        zeropp plan --model 18B --nodes 24 --hardware mine.json
    """

    model: str = "1.3B"
    """A built-in size, hf:PATH of a Hugging Face config, or module:function that builds the model."""
    nodes: int = 2
    ranks_per_node: int | None = None
    """Ranks per node; default: those of the hardware."""
    micro_batch: int = 1
    """Sequences per rank and micro-batch."""
    sequence: int = 1024
    """Tokens per sequence."""
    micro_batches: int = 1
    """Micro-batches per optimizer step."""
    compute: Precision = "bf16"
    """Data type of gathered weights and of compute."""
    reduce: Precision = "bf16"
    """Data type of gradients in reductions, before any codec."""
    checkpointing: bool = False
    """Activation checkpointing: store only the inputs of each layer, and compute it again in backward."""
    hardware: str = "a100-100g"
    """A name (an unknown one lists all), or a .json or .toml file. `zeropp doctor` writes such a file."""
    numbers: Annotated[Numbers, tyro.conf.arg(name="")] = Numbers()
    strategy: str = DEFAULT
    """Strategy: default, four-bit, paper, fsdp2, fsdp2-accumulate, fsdp2-reshard, hsdp, hfsdp, qwz, hpz or
    qgz. The plan includes plain FSDP2 for comparison."""
    recommend: bool = False
    """Compare all of these strategies, and recommend one."""
    sweep: str | None = None
    """Axes of a throughput table over link rates and nodes: link=10..800,nodes=2..48."""
    full: bool = False
    """Dry-run all layers, instead of a few layers that are then repeated."""
    json: Path | None = None
    """File for the numbers."""
    html: Path | None = None
    """File for the report."""
    trace: Path | None = None
    """File for the timeline, for ui.perfetto.dev or chrome://tracing."""


def main(arguments: list[str]) -> int:
    options = read_options(Options, arguments, "plan")
    console = table_console()
    check_files(options.json, options.html, options.trace)
    plan = _plan(options, console)
    for table in plan_tables(plan):
        console.print(table)
    console.print(EXPLANATION, style="dim")
    print_sentences(console, plan.sentences)
    _write(plan, options, console)
    return 0


def _plan(options: Options, console: Console) -> Plan:
    sys.path.insert(0, "")  # for --model module:function; the script `zeropp` lacks the current directory
    hardware = find_hardware(options.hardware).changed(**asdict(options.numbers))
    strategy = find_compared(options.strategy)
    axes = None if options.sweep is None else Axes.parse(options.sweep)
    scenario = Scenario(
        resolve(options.model),
        options.nodes,
        hardware.ranks_per_node if options.ranks_per_node is None else options.ranks_per_node,
        micro_batch=options.micro_batch,
        sequence=options.sequence,
        micro_batches=options.micro_batches,
        compute=options.compute,
        reduce=options.reduce,
        checkpointing=options.checkpointing,
    )
    with console.status("") as status:
        stderr = Console(stderr=True, highlight=False, soft_wrap=True)
        return make_plan(
            scenario,
            hardware,
            strategy,
            advise=options.recommend,
            axes=axes,
            full=options.full,
            on_progress=status.update if console.is_terminal else stderr.print,
        )


def _write(plan: Plan, options: Options, console: Console) -> None:
    if options.json is not None:
        plan.save(options.json)
        console.print(f"numbers: {options.json}")
    if options.html is not None:
        write_file(options.html, render_plan(plan))
        console.print(f"report: {options.html}")
    if options.trace is not None:
        write_chrome_trace(plan.strategies[0].timeline, options.trace)
        title = plan.strategies[0].strategy.title
        console.print(f"timeline of {title}: {options.trace}; open it at ui.perfetto.dev")
