"""Share of a training step that encodes and decodes: the quickstart's model on four local ranks.

    torchrun --standalone --nproc-per-node 4 benchmarks/codec_share.py

Reads zeropp's labels from torch's profiler on every rank and prints the mean share of each part in the wall
time of a step.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import fully_shard

import zeropp
from zeropp.comm.profiler_labels import Label, profile_all_threads

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import quickstart  # type: ignore[import-not-found, unused-ignore]


@dataclass
class Options:
    """The measurement."""

    steps: int = 20
    """Measured steps, after three for warmup."""
    micro_batches: int = 2
    node_size: int = 2


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = quickstart.Options(micro_batches=options.micro_batches, node_size=options.node_size)
    torch.manual_seed(0)
    model = quickstart.Gpt(job)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    zpp = zeropp.apply(model, zeropp.Config(node_size=options.node_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, _ = quickstart.load_text()
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        for micro_batch in range(options.micro_batches):
            zpp.set_requires_cross_node_sync(micro_batch == options.micro_batches - 1)
            model(*quickstart.sample(data, job, generator)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(options.steps):  # timed without the profiler, which slows a step down
        step()
    step_ms = (time.perf_counter() - start) / options.steps * 1e3
    with profile_all_threads() as prof:
        for _ in range(options.steps):
            step()
    parts: dict[str, float] = defaultdict(float)
    for event in prof.key_averages():
        if label := Label.read(event.key):
            parts[label.part] += event.cpu_time_total / 1e3 / options.steps
    everyone: list[tuple[float, dict[str, float]]] = [(0.0, {})] * dist.get_world_size()
    dist.all_gather_object(everyone, (step_ms, dict(parts)))
    if dist.get_rank() == 0:
        show(options, everyone)
    dist.destroy_process_group()


def show(options: Options, everyone: list[tuple[float, dict[str, float]]]) -> None:
    step_ms = sum(ms for ms, _ in everyone) / len(everyone)
    names = sorted({name for _, parts in everyone for name in parts})
    means = {name: sum(parts.get(name, 0.0) for _, parts in everyone) / len(everyone) for name in names}
    codec_ms = sum(means.get(name, 0.0) for name in ("encode", "decode", "recode"))
    table = Table(
        title=f"quickstart's model, {len(everyone)} ranks on {os.cpu_count()} cores: {step_ms:.1f} ms a step"
    )
    table.add_column("part")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    for name, ms in [*means.items(), ("encode + decode + recode", codec_ms)]:
        table.add_row(name, f"{ms:.2f}", f"{ms / step_ms:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
