"""Train a small GPT twice, with plain FSDP2 and with zeropp, and show losses and bytes side by side.

    torchrun --standalone --nproc-per-node 4 examples/quickstart.py

Four local ranks simulate two nodes of two. The text is the source code of Python's standard library, as
bytes.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812

import zeropp


@dataclass
class Options:
    """The training; the defaults take about a minute on two cores."""

    steps: int = 250
    """Optimizer steps of each run."""
    micro_batches: int = 2
    """Backward passes per optimizer step."""
    layers: int = 2
    width: int = 96
    context: int = 64
    """Length of a sequence in bytes."""
    batch: int = 4
    """Sequences per rank and micro-batch."""
    learning_rate: float = 3e-3
    seed: int = 0
    node_size: int = 2
    """Ranks per simulated node."""
    json: Path | None = None
    """File to which the results are written."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 32
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return torch.add(x, self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, options.width)
        self.position = nn.Parameter(torch.randn(options.context, options.width) * 0.02)
        self.blocks = nn.ModuleList(Block(options.width) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.width)
        self.head = nn.Linear(options.width, 256, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def load_text() -> tuple[Tensor, Tensor]:
    """Return training and validation bytes. They are the same on every machine with the same Python."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files[:120])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def sample(data: Tensor, options: Options, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - options.context - 1, (options.batch,), generator=generator)
    rows = torch.stack([data[start : start + options.context + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def mean_over_ranks(value: Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train(options: Options, config: zeropp.Config, advance: Callable[[], None]) -> dict[str, object]:
    """Train once and return the results. The seed determines the weights and each rank's data."""
    torch.manual_seed(options.seed)
    model = Gpt(options)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    zpp = zeropp.apply(model, config)  # <- the only change to a training script

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    training, validation = load_text()
    generator = torch.Generator().manual_seed(1000 + 1000 * options.seed + dist.get_rank())
    losses = []
    for _ in range(options.steps):
        total = torch.zeros(())
        for micro_batch in range(options.micro_batches):
            # Gradients of the other micro-batches accumulate inside the node.
            zpp.set_requires_cross_node_sync(micro_batch == options.micro_batches - 1)
            loss = model(*sample(training, options, generator)) / options.micro_batches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(total))
        advance()

    sent, ledger = zpp.ledger.total().across_bytes / options.steps, zpp.ledger.table()
    with torch.inference_mode():
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        batches = [model(*sample(validation, options, generator)) for _ in range(16)]
    return {
        "losses": losses,
        "validation": mean_over_ranks(torch.stack(batches).mean()),
        "bytes_across_per_node_and_step": sent * options.node_size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "summary": zpp.summary(),
        "ledger": ledger,
    }


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    runs = {
        "plain FSDP2": zeropp.Config.off(node_size=options.node_size),  # FSDP2 bit for bit, with a ledger
        "zeropp": zeropp.Config(node_size=options.node_size),
    }
    results = {}
    with Progress(disable=not is_first) as progress:
        for name, config in runs.items():
            task = progress.add_task(name, total=options.steps)
            results[name] = train(options, config, lambda task=task: progress.advance(task))  # type: ignore[misc]
    if is_first:
        show(options, results)
    if is_first and options.json is not None:
        options.json.write_text(
            json.dumps({"options": asdict(options) | {"json": None}, "runs": results}, indent=1)
        )
    dist.destroy_process_group()


def show(options: Options, results: dict[str, dict[str, object]]) -> None:
    plain, ours = results.values()
    print(ours["summary"], ours["ledger"], sep="\n")
    size = f"{plain['parameters']:,} parameters"
    table = Table(title=f"{size}, {options.steps} steps of {options.micro_batches} micro-batches")
    for column in ("", *results):
        table.add_column(column, justify="right" if column else "left")
    for step in sorted({0, options.steps // 4, options.steps // 2, options.steps - 1}):
        table.add_row(f"loss at step {step + 1}", *(f"{run['losses'][step]:.4f}" for run in results.values()))  # type: ignore[index]
    table.add_row("validation loss", *(f"{run['validation']:.4f}" for run in results.values()))
    sent = [run["bytes_across_per_node_and_step"] for run in results.values()]
    table.add_row("bytes across nodes, per node and step", *(f"{value:,.0f}" for value in sent))
    table.add_row("per parameter", *(f"{value / plain['parameters']:.2f}" for value in sent))  # type: ignore[operator]
    Console().print(table)


if __name__ == "__main__":
    main()
