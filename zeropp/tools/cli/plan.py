"""`zeropp plan`: bytes, memory and time of a training step on a cluster that need not exist yet."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ..atomic_files import check_file, write_file
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
from .lab_bench import FILE_WIDTH
from .options import read_options


@dataclass(frozen=True)
class Numbers:
    """Numbers of the hardware, in the place of those it has by name."""

    peak_tflops: float | None = None
    """Peak of a rank, in the dtype of the matrix products."""
    compute_share: float | None = None
    """How much of the peak matrix products reach: 0 to 1."""
    memory_gib: float | None = None
    """Memory of a rank."""
    memory_gbyte_s: float | None = None
    """Rate of a rank's memory."""
    in_node_gbyte_s: float | None = None
    """Rate from one rank to others of its node."""
    in_node_latency_us: float | None = None
    link_gbit_s: float | None = None
    """Rate from one node to others, in each direction."""
    link_latency_us: float | None = None


@dataclass(frozen=True)
class Options:
    """How long a training step takes, what it sends and what it needs, before there is a cluster.

    Runs FSDP2 and zeropp for real, but on one process, without data and without ranks; then lays out the step
    on the hardware.

        zeropp plan --model 18B --nodes 24 --hardware v100-dgx2-100g --recommend
        torchrun --nnodes 2 --nproc-per-node 8 ... -m zeropp doctor --hardware mine.json
        zeropp plan --model 18B --nodes 24 --hardware mine.json
    """

    model: str = "1.3B"
    """A built-in size, hf:PATH of a Hugging Face config, or module:function that builds the model."""
    nodes: int = 2
    ranks_per_node: int | None = None
    """Ranks of a node: as many as the hardware has, if not given."""
    micro_batch: int = 1
    """Sequences per rank and micro-batch."""
    sequence: int = 1024
    """Tokens of a sequence."""
    micro_batches: int = 1
    """Per optimizer step."""
    compute: Precision = "bf16"
    """What weights are gathered as, and computed in."""
    reduce: Precision = "bf16"
    """What gradients are reduced as, before any codec."""
    checkpointing: bool = False
    """Compute each layer again in backward, and keep its inputs only."""
    hardware: str = "a100-100g"
    """A name (a wrong one lists them all), or a .json or .toml file: `zeropp doctor` measures one."""
    numbers: Annotated[Numbers, tyro.conf.arg(name="")] = Numbers()
    strategy: str = DEFAULT
    """How to train: default, four-bit, paper, fsdp2, fsdp2-accumulate, fsdp2-reshard, hsdp, hfsdp, qwz, hpz
    or qgz. Plain FSDP2 is shown beside it."""
    recommend: bool = False
    """Try all of those, and say which to use."""
    sweep: str | None = None
    """Throughput over links and nodes: link=10..800,nodes=2..48."""
    full: bool = False
    """Dry-run all layers, where a few and multiplication would do."""
    json: Path | None = None
    """Where the numbers go."""
    html: Path | None = None
    """Where the report goes."""
    trace: Path | None = None
    """Where the timeline goes, for ui.perfetto.dev or chrome://tracing."""


def main(arguments: list[str]) -> int:
    options = read_options(Options, arguments, "plan")
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=FILE_WIDTH)
    for path in (options.json, options.html, options.trace):
        if path is not None:
            check_file(path)
    plan = _plan(options, console)
    for table in plan_tables(plan):
        console.print(table)
    console.print(EXPLANATION, style="dim")
    for sentence in plan.sentences:
        console.print(f"- {sentence}", markup=False)
    _write(plan, options, console)
    return 0


def _plan(options: Options, console: Console) -> Plan:
    sys.path.insert(0, "")  # a module:function of the current directory, which only `python -m` has there
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
        said = Console(stderr=True, highlight=False, soft_wrap=True)
        return make_plan(
            scenario,
            hardware,
            strategy,
            advise=options.recommend,
            axes=axes,
            full=options.full,
            on_progress=status.update if console.is_terminal else said.print,
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
