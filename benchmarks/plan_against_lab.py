"""The planner against the lab: predicted and measured step times of all strategies of `zeropp lab bench`.

    python benchmarks/plan_against_lab.py --link 500mbit
    python benchmarks/plan_against_lab.py --hardware lab.json --bench bench.json

Measures a lab cluster with `zeropp doctor`, runs the benchmark on a cluster of the same shape and link, and
dry-runs the benchmark's model. No number is fitted to the benchmark. Run it on a quiet machine.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from zeropp.tools.bench.results import Results
from zeropp.tools.bench.run import BenchSettings, run_bench
from zeropp.tools.bench.workload import Workload
from zeropp.tools.lab import Cluster
from zeropp.tools.lab.link_properties import format_rate
from zeropp.tools.plan.catalog import find_hardware
from zeropp.tools.plan.dry_run import dry_run
from zeropp.tools.plan.hardware import Hardware
from zeropp.tools.plan.models import Model
from zeropp.tools.plan.scenario import Scenario
from zeropp.tools.plan.timeline import KINDS, Timeline, simulate
from zeropp.tools.plan.trace import Compute, Trace
from zeropp.tools.strategies import COMPUTE, STRATEGIES, find_strategy

TARGET = 0.15
MEASURE_SECONDS = 180.0
FILE_WIDTH = 150


@dataclass(frozen=True)
class Options:
    """Compare the planner with the lab."""

    link: str = "500mbit"
    nodes: int = 2
    ranks_per_node: int = 2
    micro_batches: tuple[int, ...] = (1, 4)
    strategies: tuple[str, ...] = tuple(s.name for s in STRATEGIES if not s.is_auto)
    rounds: int = 2
    bench: Path | None = None
    """Results of an earlier `zeropp lab bench`; None: run it."""
    hardware: Path | None = None
    """A hardware file measured on the same cluster and link; None: measure it."""
    save: Path | None = None
    """Folder to which hardware.json and bench.json are written."""


def measure(options: Options, workload: Workload, folder: Path) -> Hardware:
    path = folder / "hardware.json"
    tokens = ["--micro-batch", str(workload.batch), "--sequence", str(workload.context), "--rounds", "1"]
    tokens += ["--width", str(workload.width)]
    with Cluster(options.nodes, options.ranks_per_node, options.link) as cluster:
        cluster.run(
            ["-m", "zeropp", "doctor", "--parts", "speed", "--hardware", str(path.resolve()), *tokens],
            timeout_seconds=MEASURE_SECONDS,
        ).check()
    return find_hardware(str(path))


def bench(options: Options, folder: Path, console: Console) -> Results:
    settings = BenchSettings(
        options.nodes,
        options.ranks_per_node,
        link=options.link,
        micro_batches=options.micro_batches,
        strategies=options.strategies,
        rounds=options.rounds,
        loss_steps=0,
    )
    with console.status("") as status:
        results = run_bench(
            settings, lambda what, done: status.update(f"{done:.0%} {what}") if what else None
        )
    results.save(folder / "bench.json")
    return results


def predict(results: Results, strategy: str, micro_batches: int, hardware: Hardware) -> Timeline:
    workload = results.workload
    scenario = Scenario(
        Model("the benchmark's GPT", workload.build_model),
        results.nodes,
        results.ranks_per_node,
        micro_batch=workload.batch,
        sequence=workload.context,
        micro_batches=micro_batches,
        compute="fp32",
        reduce="bf16" if strategy == "hsdp" else "fp32",
    )
    if strategy != COMPUTE.name:
        return simulate(dry_run(scenario, find_strategy(strategy)), hardware)
    return simulate(without_hops(dry_run(scenario, find_strategy("fsdp2"))), hardware)


def without_hops(trace: Trace) -> Trace:
    """Return the trace without communication."""
    events = tuple(event if isinstance(event, Compute) else replace(event, hops=()) for event in trace.events)
    return replace(trace, events=events)


def compare(results: Results, hardware: Hardware) -> tuple[Table, list[float]]:
    table = Table(
        title=f"{results.nodes} nodes x {results.ranks_per_node} ranks, {format_rate(results.link_bit_s)}: "
        "step in ms, predicted and measured"
    )
    for column in ("", "micro-batches", "predicted", "measured", "spread", "error", *KINDS):
        table.add_column(column, justify="right" if column else "left")
    errors = []
    for micro_batches in results.micro_batches():
        measured = {COMPUTE.name: (statistics.median(results.compute_ms[micro_batches]), 0.0)}
        measured |= {
            cell.strategy: (cell.median_ms, cell.spread)
            for cell in results.cells
            if cell.micro_batches == micro_batches and find_strategy(cell.strategy).engine == "fsdp2"
        }
        for strategy, (median_ms, spread) in measured.items():
            timeline = predict(results, strategy, micro_batches, hardware)
            error = timeline.step_seconds * 1e3 / median_ms - 1
            errors.append(error)
            split = (f"{timeline.critical_seconds[kind] * 1e3:,.0f}" for kind in KINDS)
            table.add_row(
                find_strategy(strategy).title, str(micro_batches), f"{timeline.step_seconds * 1e3:,.0f}",
                f"{median_ms:,.0f}", f"{spread:.0%}", f"{error:+.1%}", *split,
                style=None if abs(error) <= TARGET else "red",
            )  # fmt: skip
        table.add_section()
    return table, errors


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=FILE_WIDTH)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.save or Path(scratch)
        results = None if options.bench is None else Results.load(options.bench)
        workload = Workload() if results is None else results.workload
        if options.hardware is None:
            hardware = measure(options, workload, folder)
        else:
            hardware = find_hardware(str(options.hardware))
        if results is None:
            results = bench(options, folder, console)
    table, errors = compare(results, hardware)
    console.print(table)
    within = sum(abs(error) <= TARGET for error in errors)
    console.print(
        f"{within} of {len(errors)} within {TARGET:.0%}; median error "
        f"{statistics.median(map(abs, errors)):.1%}; largest {max(map(abs, errors)):.1%}"
    )


if __name__ == "__main__":
    main()
