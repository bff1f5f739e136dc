"""Train one model with FSDP2, with HSDP and with zeropp, and compare loss, bytes across nodes, and memory.

    torchrun --standalone --nproc-per-node 4 examples/compare_hsdp.py

Four local ranks simulate two nodes of two. FSDP2 shards over all ranks. HSDP shards inside each node and
all-reduces gradients between nodes, so its ranks hold twice as much. zeropp shards like FSDP2.

zeropp's ledger counts the bytes of FSDP2 and zeropp. Those of HSDP are computed, not measured: its only
traffic between nodes is the all-reduce, in which a rank sends its shard of the gradients 2 (nodes - 1) /
nodes times. With two nodes, that is 4 bytes per parameter in fp32 and 2 in bf16. For bf16, interface counters
show 2.02 (docs/lab-results.md).
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812

import zeropp

NODE_SIZE, MICRO_BATCHES = 2, 4
LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 2, 128, 4, 64, 32


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def sample(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences that count upwards, each with its own start and step."""
    start = torch.randint(VOCABULARY, (4, 1), generator=generator)
    step = torch.randint(1, 5, (4, 1), generator=generator)
    tokens = (start + step * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


class Result(NamedTuple):
    loss: float
    """Mean over ranks and micro-batches of the last step."""
    node_bytes: float
    """Bytes that each node sends to the other, per step."""
    held_bytes: int
    """Weights, gradients and optimizer state of a rank, and zeropp's buffers; without activations."""


def train(technique: str, steps: int) -> Result:
    nodes = dist.get_world_size() // NODE_SIZE
    torch.manual_seed(0)  # all ranks, and all techniques, start with the same weights
    model = Gpt()
    # HSDP's mesh has two dimensions: replicas (one per node), and shards (the ranks of a node).
    if technique == "HSDP":
        mesh = init_device_mesh("cpu", (nodes, NODE_SIZE), mesh_dim_names=("replicas", "shards"))
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)

    zpp = None
    if technique == "zeropp":
        zpp = zeropp.apply(model, zeropp.Config(node_size=NODE_SIZE))
    elif technique == "FSDP2":
        zpp = zeropp.apply(model, zeropp.Config.off(node_size=NODE_SIZE))  # FSDP2 bit for bit, with a ledger

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for micro_batch in range(MICRO_BATCHES):
            is_last = micro_batch == MICRO_BATCHES - 1
            # HSDP and zeropp accumulate inside the node until the last micro-batch. FSDP2 reduces every
            # micro-batch. Its own switch, set_requires_gradient_sync, sends less but holds the gradients of
            # the whole model on every rank.
            if technique == "HSDP":
                model.set_requires_all_reduce(is_last)
            elif technique == "zeropp" and zpp is not None:
                zpp.set_requires_cross_node_sync(is_last)
            loss = model(*sample(generator)) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        optimizer.step()

    dist.all_reduce(total)
    tensors = [tensor for p in model.parameters() for tensor in (p, p.grad)]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    held_bytes = sum(local_bytes(tensor) for tensor in tensors)
    if zpp is None:
        gradient_bytes = sum(local_bytes(p.grad) for p in model.parameters())
        node_bytes = NODE_SIZE * gradient_bytes * 2 * (nodes - 1) / nodes
    else:
        held_bytes += zpp.communication_bytes
        node_bytes = (
            NODE_SIZE * zpp.ledger.total().across_bytes / steps
        )  # the ranks of a node send equally many
    return Result(total.item() / dist.get_world_size(), node_bytes, held_bytes)


def local_bytes(tensor: Tensor | None) -> int:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return 0 if tensor is None else tensor.nbytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {technique: train(technique, steps) for technique in ("FSDP2", "HSDP", "zeropp")}
    if dist.get_rank() == 0:
        print(f"{steps} steps of {MICRO_BATCHES} micro-batches")
        print(f"{'':<6} {'loss':>7} {'bytes across nodes':>19} {'memory of a rank':>17}")
        for technique, result in results.items():
            source = "computed" if technique == "HSDP" else "ledger"
            print(
                f"{technique:<6} {result.loss:>7.4f} {result.node_bytes:>19,.0f} {result.held_bytes:>17,}   "
                f"(bytes: {source}, per node and step)"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
