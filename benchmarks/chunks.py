"""One chunk or two chunks per collective on gloo: the default Config with chunks=1 and chunks=2. They
alternate in the same processes on the same shaped links, for units of several sizes.

    python benchmarks/chunks.py                      # 2 nodes x 2 ranks, 170 Mbit/s, three sizes: 8 minutes
    python benchmarks/chunks.py --widths 384 --link 45mbit

`Config.chunks = "auto"` (comm/chunks.py) is based on the results. CPU time is the sum over ranks, divided by
cores.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, replace

import tyro
from rich.console import Console
from rich.table import Table

from zeropp.tools.bench.ranks import Ranks
from zeropp.tools.bench.workload import Workload
from zeropp.tools.lab import Cluster
from zeropp.tools.lab.link_properties import UNLIMITED
from zeropp.tools.strategies import Strategy, find_strategy

COUNTS = (1, 2)


@dataclass(frozen=True)
class Options:
    """Compare one chunk and two chunks."""

    widths: tuple[int, ...] = (384, 576, 1152)
    layers: int = 4
    batch: int = 4
    link: str = "170mbit"
    nodes: int = 2
    ranks_per_node: int = 2
    rounds: int = 3
    steps: int = 4


def with_chunks(strategy: Strategy, count: int) -> Strategy:
    assert strategy.config is not None
    return replace(strategy, config=replace(strategy.config, chunks=count))


def measure(options: Options, width: int, console: Console) -> tuple[int, dict[int, tuple[float, float]]]:
    """Return a block's elements in a rank's shard and, by number of chunks, the step time and CPU time in
    ms."""
    workload = Workload(layers=options.layers, width=width, batch=options.batch)
    model = workload.build_model()
    row = sum(p.numel() for p in model.blocks[0].parameters()) // (options.nodes * options.ranks_per_node)
    step_ms: dict[int, list[float]] = {count: [] for count in COUNTS}
    cores_ms: dict[int, list[float]] = {count: [] for count in COUNTS}
    shape = (options.nodes, options.ranks_per_node, UNLIMITED)
    with Cluster(*shape) as cluster, Ranks(cluster) as ranks, console.status("") as status:
        for number in range(options.rounds):
            for count in COUNTS:
                status.update(f"width {width}, round {number + 1} of {options.rounds}, chunks={count}")
                cluster.set_link(link=UNLIMITED)
                ranks.build(with_chunks(find_strategy("default"), count), workload)
                ranks.take_steps(2, 1)
                cluster.set_link(link=options.link)
                runs = ranks.take_steps(options.steps, 1)
                step_ms[count] += [1e3 * max(at) for at in zip(*(run.seconds for run in runs), strict=True)]
                cpu_seconds = sum(run.cpu_seconds for run in runs) / options.steps
                cores_ms[count].append(1e3 * cpu_seconds / len(os.sched_getaffinity(0)))
    return row, {count: (min(step_ms[count]), statistics.median(cores_ms[count])) for count in COUNTS}


def main(options: Options) -> None:
    console = Console(width=120)
    table = Table(title=f"chunks=1 and chunks=2, {options.link}: best step and CPU time in ms")
    for column in ("width", "elements of a row", "step: 1", "2", "2 / 1", "CPU: 1", "2", "2 / 1"):
        table.add_column(column, justify="right")
    for width in options.widths:
        row, found = measure(options, width, console)
        (step_1, cores_1), (step_2, cores_2) = (found[count] for count in COUNTS)
        table.add_row(
            f"{width}", f"{row:,}", f"{step_1:,.0f}", f"{step_2:,.0f}", f"{step_2 / step_1:.3f}",
            f"{cores_1:,.0f}", f"{cores_2:,.0f}", f"{cores_2 / cores_1:.3f}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
