"""`zeropp lab run`: run a torchrun script on a cluster of network namespaces."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..atomic_files import make_folder
from ..lab import Change, Cluster, Job, JobResult, LinkCounters, Schedule
from ..process_exit import describe_exit
from .options import read_options

COLORS = ("cyan", "green", "magenta", "yellow", "blue", "red")


@dataclass
class Options:
    """Run a torchrun script on nodes that are network namespaces of this machine, with shaped links.

    The script and its arguments follow `--`:

        zeropp lab run --nodes 2 --ranks-per-node 2 --link 1gbit -- train.py --steps 10
    """

    nodes: int = 2
    ranks_per_node: int = 2
    link: str = "1gbit"
    """Rate of each node's link, in both directions: 300mbit, 1gbit, ..., or unlimited."""
    delay: str = "0ms"
    """One-way delay between nodes."""
    loss: str = "0%"
    """Share of lost packets between nodes."""
    at: tuple[str, ...] = ()
    """Changes during the run: "5s node1 down" "7s node1 up" "10s all link=100mbit delay=5ms loss=1%"."""
    logs: Path | None = None
    """Folder for the output of each rank: rank-0.log and so on."""
    timeout: float | None = None
    """Time limit of the job, in seconds."""


def main(arguments: list[str]) -> int:
    ours, program = _split(arguments)
    options = read_options(Options, ours, "lab run")
    if not program:
        raise ValueError("no script is given; expected one after `--`: zeropp lab run -- train.py ...")
    changes = [Change.parse(text) for text in options.at]
    if options.logs is not None:
        make_folder(options.logs)
    console = Console(highlight=False, soft_wrap=True)
    with Cluster(options.nodes, options.ranks_per_node, options.link, options.delay, options.loss) as cluster:
        schedule = Schedule(cluster, changes, lambda change: console.print(f"[bold]{change}[/]"))
        before = cluster.counters()
        job = cluster.start(
            program, on_line=lambda source, line: _print_line(console, source, line), log_folder=options.logs
        )
        schedule.start()
        try:
            result = _wait(console, cluster, job, options.timeout)
        finally:
            schedule.stop()
        traffic = [now.since(then) for now, then in zip(cluster.counters(), before, strict=True)]
        _show(console, cluster, result, traffic)
    return 0 if result.succeeded else 1


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _print_line(console: Console, source: str, line: str) -> None:
    """Print a line of output from `source`: "rank 3" or "node 0"."""
    number = int(source.split()[1])
    style = COLORS[number % len(COLORS)] if source.startswith("rank") else "dim"
    console.print(f"[{style}]{source:>7} |[/] ", end="")
    console.print(line, markup=False)


def _wait(console: Console, cluster: Cluster, job: Job, timeout_seconds: float | None) -> JobResult:
    """Wait for the job. On a terminal, show the traffic of the links every second."""
    before, started = cluster.counters(), time.monotonic()
    with console.status("starting ranks") as status:

        def show_links() -> None:
            nonlocal before
            now = cluster.counters()
            sent = ", ".join(
                f"node {node} {new.since(old).tx_bytes / 1e6:.1f}"
                for node, (new, old) in enumerate(zip(now, before, strict=True))
            )
            before = now
            status.update(f"{time.monotonic() - started:.0f} s; MB sent per second: {sent}")

        return job.wait(timeout_seconds, each_second=show_links)


def _show(console: Console, cluster: Cluster, result: JobResult, traffic: list[LinkCounters]) -> None:
    links = Table(title=f"bytes per link, {result.seconds:.1f} s")
    for column in ("node", "link", "sent", "received", "packets sent", "packets received"):
        links.add_column(column, justify="left" if column == "link" else "right")
    for node, (link, counters) in enumerate(zip(cluster.links, traffic, strict=True)):
        properties = ", ".join((link.link, link.delay, link.loss))
        numbers = (counters.tx_bytes, counters.rx_bytes, counters.tx_packets, counters.rx_packets)
        links.add_row(str(node), properties, *(f"{number:,}" for number in numbers))
    console.print(links)
    ends = Table(title="ranks")
    for column in ("rank", "node", "end"):
        ends.add_column(column, justify="left" if column == "end" else "right")
    for rank, code in result.exit_codes.items():
        style = None if code == 0 else "red"
        ends.add_row(str(rank), str(rank // cluster.ranks_per_node), describe_exit(code), style=style)
    console.print(ends)
    for line in result.advice():
        console.print(line, markup=False)
