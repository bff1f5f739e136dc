"""Program for torchrun: trains for a few steps and writes the results to files.

    python -m tests.tools.lab FOLDER RUN...

A run is a key of CONFIGS, or a key of LORA, which uses the default. A run with ":" and a suffix waits for the
file FOLDER/<run> before it starts, so that the test can change the links first.

Each rank writes FOLDER/<run>.<rank>.json: the losses, the seconds of every step, and the bytes of the ledger
and of the node's interface from the end of the first step to the end of the last.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.distributed.fsdp import fully_shard

import zeropp
from tests.tools.lab.lora import Lora

CONFIGS = {
    "default": zeropp.Config(),
    "four_bit": zeropp.Config.four_bit(),
    "wire16": zeropp.Config.wire16(),
}
LORA = {"lora-fp32": torch.float32, "lora-bf16": torch.bfloat16}
WIDTH = 384


CUT, DOWN = "default:cut", "default:down"
"""Runs in which the test takes a link down after the third step. CUT runs until it has waited for the link,
DOWN until it times out."""
STEPS, MOST_STEPS = 5, 500
TIMEOUT = timedelta(seconds=3)


@dataclass
class Options:
    folder: tyro.conf.Positional[Path]
    runs: tyro.conf.Positional[tuple[str, ...]]


class Sent(NamedTuple):
    """Traffic that this node's interface has sent."""

    bytes: int
    packets: int

    @classmethod
    def until_now(cls) -> Sent:
        """Read the counters between two steps. /proc/net/dev shows the reader's network namespace."""
        dist.barrier()
        (line,) = (row for row in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in row)
        dist.barrier()
        numbers = [int(number) for number in line.split(":")[1].split()]
        return cls(numbers[8], numbers[9])

    def since(self, before: Sent) -> Sent:
        return Sent(self.bytes - before.bytes, self.packets - before.packets)


class Layers(nn.Sequential):
    """Linear layers that learn to copy."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.blocks = list(self)

    def loss(self, generator: torch.Generator) -> torch.Tensor:
        x = torch.randn(16, WIDTH, generator=generator)
        return (self(x) - x).square().mean()  # type: ignore[no-any-return]


def make_model(name: str) -> Any:
    return Lora(LORA[name]) if name in LORA else Layers()


def train(run: str) -> dict[str, Any]:
    name = run.partition(":")[0]
    torch.manual_seed(0)
    model = make_model(name)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    zpp = zeropp.apply(model, CONFIGS.get(name, zeropp.Config()))
    if run == DOWN:
        zpp.set_timeout(TIMEOUT)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses: list[float] = []
    seconds: list[float] = []
    before = Sent(0, 0)
    has_waited = False
    for step in range(MOST_STEPS if run in (CUT, DOWN) else STEPS):
        started = time.monotonic()
        if run == CUT:  # inside the timed step, because this all-reduce may be the one that waits
            has_waited = any_rank_waited(seconds[3:])
        loss = model.loss(generator)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.monotonic() - started)
        if step == 0:
            before = Sent.until_now()
            zpp.ledger.reset()
        print(f"{run} step {step}", flush=True)  # noqa: T201
        if has_waited:
            break
    ledger_bytes = zpp.ledger.total().across_bytes
    sent = Sent.until_now().since(before)
    return {
        "losses": losses,
        "seconds": seconds,
        "ledger_bytes": ledger_bytes,
        "counter_bytes": sent.bytes,
        "packets": sent.packets,
        "parameters": sum(p.numel() for p in trained),
    }


def any_rank_waited(seconds: list[float]) -> bool:
    """Return whether a step took longer than a second on any rank. All ranks return the same."""
    longest = torch.tensor(max(seconds, default=0.0))
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item() > 1.0


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    for run in options.runs:
        print(f"{run} waits", flush=True)  # noqa: T201
        while ":" in run and not (options.folder / run).exists():
            time.sleep(0.01)
        (options.folder / f"{run}.{dist.get_rank()}.json").write_text(json.dumps(train(run)))
    dist.destroy_process_group()
