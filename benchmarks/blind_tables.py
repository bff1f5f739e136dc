"""The planner against two published tables to which none of its numbers was fitted.

    python benchmarks/blind_tables.py

torchtitan: Llama 3.1 8B with FSDP2 on 8 and 128 H100s. The benchmark predicts the loss of throughput from 8
to 128 GPUs, and the exposed communication. torchtitan recomputes selectively, which the planner does not
support, so the benchmark predicts the two cases around it: no and full recomputation.

SDP4Bit: GPTs of 1.3B and 2.7B with ZeRO-1 and fp32 gradients, compared with 4-bit weight differences and
gradients of 8 bits in the node and 4 across. ZeRO-1 is planned as FSDP2 without resharding after forward,
which sends the same bytes. The rates of the links are not published: one rate per cluster is fitted to the
two figures of ZeRO-1, and the other two figures are predicted. The schedule is not published either, so both
are shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from zeropp.config import Config
from zeropp.tools.models.gpt import GPT, GPTConfig
from zeropp.tools.plan.catalog import FITTED_SHARE, find_hardware
from zeropp.tools.plan.dry_run import dry_run
from zeropp.tools.plan.hardware import Hardware
from zeropp.tools.plan.models import Model, resolve
from zeropp.tools.plan.scenario import Scenario
from zeropp.tools.plan.timeline import simulate
from zeropp.tools.plan.trace import Event, Gather, Trace
from zeropp.tools.strategies import Strategy, find_strategy

LLAMA = resolve(f"hf:{Path(__file__).parent / 'data' / 'llama_3_1_8b.json'}")
TORCHTITAN = {"eager": {8: 5762, 128: 5605}, "compiled": {8: 6667, 128: 6514}}
"""Published tokens per second and GPU, by the number of GPUs."""

ZERO1 = find_strategy("fsdp2")
SDP4BIT = Strategy("sdp4bit", "SDP4Bit", Config.four_bit(gradients_in_node="int8", overlap=False))
"""overlap=False: `Config.overlap` uses threads on a CPU, which the schedule "in order" must not have."""
GPTS = {"1.3B": (24, 2048), "2.7B": (32, 2560)}
"""Layers and width."""
FILE_WIDTH = 150


@dataclass(frozen=True)
class Cluster:
    """A cluster of SDP4Bit's paper."""

    name: str
    hardware: Hardware
    published: dict[str, tuple[float, float]]
    """Published TFLOPs per GPU of ZeRO-1 and SDP4Bit, by model."""


A100 = find_hardware("a100-200g")
H800 = replace(find_hardware("h100-8x400g"), name="h800", in_node_gbyte_s=200.0)
"""An H100 whose NVLink has 400 GB/s in both directions together (NVIDIA's data sheet)."""
CLUSTERS = [
    Cluster(
        "16 x 4 A100, Slingshot 10",
        replace(A100, ranks_per_node=4),
        {"1.3B": (24.1, 57.6), "2.7B": (24.0, 58.4)},
    ),
    Cluster("16 x 8 H800", H800, {"1.3B": (69.1, 106.0), "2.7B": (71.9, 116.9)}),
]
NODES = 16
LINKS = [4 * 1.02**step for step in range(270)]
"""Candidate rates in Gbit/s: 4 to 830."""


def llama_table() -> Table:
    hardware = find_hardware("h100-8x400g")
    table = Table(
        title="Llama 3.1 8B, 2 x 8,192 tokens per GPU, H100, 400 Gbit/s each: tokens/s per GPU, overlapped"
    )
    columns = ("recomputed", "8 GPUs", "128 GPUs", "128 / 8", "exposed on 8", "on 128")
    for column in columns:
        table.add_column(column, justify="right")
    predicted: dict[str, tuple[float, float]] = {}
    for checkpointing in track((False, True), "dry runs of Llama"):
        tokens, exposed = [], []
        for nodes in (1, 16):
            scenario = Scenario(LLAMA, nodes, 8, 2, 8192, reduce="fp32", checkpointing=checkpointing)
            timeline = simulate(dry_run(scenario, ZERO1), hardware)
            tokens.append(timeline.tokens_per_second / scenario.world_size)
            exposed.append(1 - timeline.busy_seconds["compute"] / timeline.step_seconds)
        small, large = tokens
        shares = [f"{share:.1%}" for share in exposed]
        what = "all" if checkpointing else "nothing"
        predicted[what] = small, large
        table.add_row(what, f"{small:,.0f}", f"{large:,.0f}", f"{large / small:.3f}", *shares)
    for how, published in TORCHTITAN.items():
        small, large = published[8], published[128]
        table.add_row(f"published, {how}", f"{small:,}", f"{large:,}", f"{large / small:.3f}", "", "")
    for what, (small, large) in predicted.items():
        for how, published in TORCHTITAN.items():
            errors = (small / published[8], large / published[128])
            ratio = errors[1] / errors[0]
            cells = [f"{error - 1:+.1%}" for error in (*errors, ratio)]
            table.add_row(f"error of {what} against {how}", *cells, "", "")
    return table


@cache
def zero1_trace(model: str, ranks_per_node: int, strategy: Strategy) -> Trace:
    layers, width = GPTS[model]
    config = GPTConfig(
        layers=layers, width=width, heads=width // 128, context=2048, vocab_size=50304, tied=True
    )
    scenario = Scenario(
        Model(model, lambda: GPT(config)), NODES, ranks_per_node, sequence=2048, reduce="fp32"
    )
    trace = dry_run(scenario, strategy)
    return replace(trace, events=_gathered_once(trace.events))


def _gathered_once(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Remove the second gather of each unit: its weights stay gathered after forward."""
    remaining: list[Event] = []
    gathered: set[str] = set()
    for event in events:
        if isinstance(event, Gather) and event.unit in gathered:
            continue
        if isinstance(event, Gather):
            gathered.add(event.unit)
        remaining.append(event)
    return tuple(remaining)


def predict(cluster: Cluster, hardware: Hardware, model: str, strategy: Strategy) -> float:
    return simulate(zero1_trace(model, cluster.hardware.ranks_per_node, strategy), hardware).tflops


def fit_link(cluster: Cluster, schedule: Hardware) -> Hardware:
    """Return the hardware with the rate that minimizes the larger error of the two figures of ZeRO-1."""

    def error(hardware: Hardware) -> float:
        errors = (
            math.log(predict(cluster, hardware, model, ZERO1) / zero1)
            for model, (zero1, _) in cluster.published.items()
        )
        return max(map(abs, errors))

    return min((schedule.changed(link_gbit_s=link) for link in LINKS), key=error)


def sdp4bit_table() -> Table:
    table = Table(title=f"SDP4Bit: TFLOPs per GPU, achievable share {FITTED_SHARE:.2f} as everywhere")
    columns = ("cluster", "schedule", "Gbit/s, fitted", "model", "ZeRO-1", "published", "error")
    for column in (*columns, "SDP4Bit", "published", "error"):
        table.add_column(column, justify="right")
    for cluster in track(CLUSTERS, "dry runs of GPTs"):
        for overlap in (False, True):
            hardware = fit_link(cluster, cluster.hardware.changed(overlap=overlap))
            for model, (zero1, sdp4bit) in cluster.published.items():
                row = [
                    cluster.name,
                    "overlapped" if overlap else "in order",
                    f"{hardware.link_gbit_s:.0f}",
                    model,
                ]
                for strategy, published in ((ZERO1, zero1), (SDP4BIT, sdp4bit)):
                    predicted = predict(cluster, hardware, model, strategy)
                    row += [f"{predicted:.1f}", f"{published:.1f}", f"{predicted / published - 1:+.0%}"]
                table.add_row(*row)
    return table


def main() -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=FILE_WIDTH)
    console.print(llama_table())
    console.print(sdp4bit_table())


if __name__ == "__main__":
    main()
