"""The planner against the ZeRO++ paper: its 20 cells, its fully specified run, and predictions beyond it.

    python benchmarks/paper_cells.py [--scaling]

All numbers come from data sheets, except for the achievable share of the peak. This share is fitted to the
whole table at once (the smallest median error of all 40 throughputs). The paper ran DeepSpeed on V100s:
ZeRO-3, and ZeRO++ with activation checkpointing. The planner predicts the same traffic with FSDP2 and
`Config.paper()`.

The paper does not name its schedule, so the table has predictions for both: in order (compute waits for all
communication), and overlapped like FSDP2. The published numbers decide between the two.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from zeropp.config import Config
from zeropp.tools.models.gpt import GPT, GPTConfig
from zeropp.tools.plan.catalog import find_hardware
from zeropp.tools.plan.dry_run import dry_run
from zeropp.tools.plan.hardware import Hardware
from zeropp.tools.plan.models import Model
from zeropp.tools.plan.scenario import Scenario
from zeropp.tools.plan.timeline import Timeline, simulate
from zeropp.tools.plan.trace import Trace
from zeropp.tools.strategies import Strategy, find_strategy

PUBLISHED = json.loads((Path(__file__).parent / "data" / "zeropp_paper.json").read_text())
VOCABULARY = 50304
ZERO3 = find_strategy("fsdp2")
PAPER = Strategy("paper", "the paper's set", Config.paper(overlap=False))
"""overlap=False: `Config.overlap` uses threads on a CPU, which the schedule "in order" must not have."""
STRATEGIES: dict[str, Strategy] = {"zero3": ZERO3, "zeropp": PAPER}
V100 = find_hardware("v100-dgx2-100g")
SHARES = [share / 100 for share in range(36, 62, 2)]
CANNOT_EXPLAIN = 0.15
"""Error of the speedup above which the table says "not explained"."""
FILE_WIDTH = 150


@dataclass(frozen=True)
class Options:
    """Predict the published numbers of the ZeRO++ paper."""

    scaling: bool = False
    """Also predict 64 to 4,096 GPUs, at 100 and 400 Gbit/s."""
    json: Path | None = None
    """File to which all numbers are written."""


@dataclass(frozen=True)
class Cell:
    link_gbit_s: float
    tokens: int
    model: str
    zero3: float
    zeropp: float

    def predicted(self, strategy: str, hardware: Hardware) -> float:
        trace = trace_of(self.model, PUBLISHED["nodes"], self.tokens, strategy)
        return simulate(trace, hardware.changed(link_gbit_s=self.link_gbit_s)).tflops

    def speedup_error(self, hardware: Hardware) -> float:
        predicted = self.predicted("zeropp", hardware) / self.predicted("zero3", hardware)
        return predicted / (self.zeropp / self.zero3) - 1


CELLS = [Cell(**cell) for cell in PUBLISHED["cells"]]


def model_of(name: str) -> Model:
    size = {key: PUBLISHED["models"][name][key] for key in ("layers", "width", "heads")}
    config = GPTConfig(**size, context=2048, vocab_size=VOCABULARY, tied=True)
    return Model(name, lambda: GPT(config))


@cache
def trace_of(model: str, nodes: int, sequence: int, strategy: str) -> Trace:
    """Dry-run one sequence per GPU with 16-bit weights and gradients and activation checkpointing."""
    scenario = Scenario(
        model_of(model),
        nodes,
        PUBLISHED["ranks_per_node"],
        sequence=sequence,
        compute="fp16",
        reduce="fp16",
        checkpointing=True,
    )
    return dry_run(scenario, STRATEGIES[strategy])


def fit_share(schedule: Hardware) -> Hardware:
    """Return the hardware with the achievable share that has the smallest median error of all throughputs."""

    def error(share: float) -> float:
        hardware = schedule.changed(compute_share=share)
        errors = [
            abs(cell.predicted(strategy, hardware) / published - 1)
            for cell in CELLS
            for strategy, published in (("zero3", cell.zero3), ("zeropp", cell.zeropp))
        ]
        return statistics.median(errors)

    return schedule.changed(compute_share=min(SHARES, key=error))


def cells_table(hardware: Hardware, title: str) -> Table:
    errors = [cell.speedup_error(hardware) for cell in CELLS]
    table = Table(
        title=f"{title}: achievable share {hardware.compute_share:.2f} (fitted), median error of the speedup "
        f"{statistics.median(map(abs, errors)):.1%}, largest {max(map(abs, errors)):.1%}"
    )
    for column in ("Gbit/s", "tokens", "model", "ZeRO-3", "published", "ZeRO++", "published", "speedup"):
        table.add_column(column, justify="right")
    for column in ("published", "error", ""):
        table.add_column(column, justify="right")
    for cell, error in zip(CELLS, errors, strict=True):
        zero3, ours = cell.predicted("zero3", hardware), cell.predicted("zeropp", hardware)
        remark = "not explained" if abs(error) > CANNOT_EXPLAIN else ""
        throughputs = (f"{zero3:.1f}", f"{cell.zero3:g}", f"{ours:.1f}", f"{cell.zeropp:g}")
        speedups = (f"{ours / zero3:.2f}", f"{cell.zeropp / cell.zero3:.2f}", f"{error:+.1%}")
        table.add_row(f"{cell.link_gbit_s:g}", str(cell.tokens), cell.model, *throughputs, *speedups, remark)
    return table


def run_timeline(strategy: str, hardware: Hardware) -> Timeline:
    run = PUBLISHED["run"]
    trace = trace_of(run["model"], run["nodes"], run["sequence"], strategy)
    return simulate(trace, hardware.changed(link_gbit_s=float(run["link_gbit_s"])))


def run_table(hardware: Hardware) -> Table:
    table = Table(title="the tutorial's run, phase by phase: ms predicted / published (error)")
    for column in ("", "step", "forward", "backward", "optimizer"):
        table.add_column(column, justify="right" if column else "left")
    for strategy, title in (("zero3", "ZeRO-3"), ("zeropp", "ZeRO++")):
        timeline, published = run_timeline(strategy, hardware), PUBLISHED["run"][strategy]
        predicted: dict[str, float] = {"step": timeline.step_seconds}
        predicted |= {str(phase): seconds for phase, seconds in timeline.phase_seconds().items()}
        table.add_row(
            title,
            *(
                f"{predicted[phase] * 1e3:,.0f} / {published[phase]:,.0f} "
                f"({predicted[phase] * 1e3 / published[phase] - 1:+.0%})"
                for phase in ("step", "forward", "backward", "optimizer")
            ),
        )
    return table


Schedule = Literal["in order", "overlapped"]


def scaling_points(share: float) -> Iterator[dict[str, Any]]:
    """Yield predictions for 18B with 2K tokens per GPU: ZeRO-3, the paper's set and our default."""
    strategies = {
        "ZeRO-3": ZERO3,
        "the paper's set": PAPER,
        "our default": Strategy("default", "our default", Config(overlap=False)),
    }
    for gpus in track([64, 128, 256, 512, 1024, 2048, 4096], "dry runs"):
        for title, strategy in strategies.items():
            scenario = Scenario(
                model_of("18B"),
                gpus // 16,
                16,
                sequence=2048,
                compute="fp16",
                reduce="fp16",
                checkpointing=True,
            )
            trace = dry_run(scenario, strategy)
            for link in (100.0, 400.0):
                for schedule in ("in order", "overlapped"):
                    hardware = V100.changed(
                        link_gbit_s=link, compute_share=share, overlap=schedule == "overlapped"
                    )
                    timeline = simulate(trace, hardware)
                    yield {
                        "gpus": gpus, "strategy": title, "link_gbit_s": link, "schedule": schedule,
                        "tflops": timeline.tflops, "tokens_per_second": timeline.tokens_per_second,
                    }  # fmt: skip


def scaling_table(points: list[dict[str, Any]], schedule: str) -> Table:
    table = Table(title=f"18B, 2K tokens per GPU, V100 DGX-2, {schedule}: predicted TFLOPs per GPU")
    counts = sorted({point["gpus"] for point in points})
    for column in ("Gbit/s", "", *(f"{gpus:,}" for gpus in counts)):
        table.add_column(column, justify="right" if column else "left")
    for link in (100.0, 400.0):
        for title in dict.fromkeys(point["strategy"] for point in points):
            mine = {
                point["gpus"]: point["tflops"]
                for point in points
                if (point["link_gbit_s"], point["strategy"], point["schedule"]) == (link, title, schedule)
            }
            table.add_row(f"{link:g}", title, *(f"{mine[gpus]:.1f}" for gpus in counts))
    return table


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=FILE_WIDTH)
    wanted = {
        (cell.model, PUBLISHED["nodes"], cell.tokens, strategy) for cell in CELLS for strategy in STRATEGIES
    }
    for arguments in track(sorted(wanted), "dry runs", console=console):
        trace_of(*arguments)
    in_order = fit_share(V100.changed(overlap=False))
    overlapped = fit_share(V100.changed(overlap=True))
    console.print(cells_table(in_order, "in order"))
    console.print(cells_table(overlapped, "overlapped as FSDP2 does it"))
    console.print(run_table(in_order))
    guessed = ", ".join(name for name, size in PUBLISHED["models"].items() if not size["published"])
    console.print(
        f"Layers and widths of {guessed} are not published where we read; ours have the same 12 L h^2."
    )
    points = list(scaling_points(in_order.compute_share)) if options.scaling else []
    for schedule in ("in order", "overlapped") if points else ():
        console.print(scaling_table(points, schedule))
    if options.json is not None:
        options.json.write_text(json.dumps(_numbers(in_order, overlapped, points), indent=1) + "\n")


def _numbers(in_order: Hardware, overlapped: Hardware, points: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "compute_share": {"in order": in_order.compute_share, "overlapped": overlapped.compute_share},
        "cells": [
            {
                "link_gbit_s": cell.link_gbit_s, "tokens": cell.tokens, "model": cell.model,
                "published": [cell.zero3, cell.zeropp],
                "in order": [cell.predicted(strategy, in_order) for strategy in STRATEGIES],
                "overlapped": [cell.predicted(strategy, overlapped) for strategy in STRATEGIES],
            }
            for cell in CELLS
        ],
        "run": {
            strategy: {"step": timeline.step_seconds, **timeline.phase_seconds()}
            for strategy, timeline in ((name, run_timeline(name, in_order)) for name in STRATEGIES)
        },
        "scaling": points,
    }  # fmt: skip


if __name__ == "__main__":
    main()
