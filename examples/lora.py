"""Train LoRA adapters on a frozen base. The base crosses nodes once; each later step sends only adapters.

    torchrun --standalone --nproc-per-node 4 examples/lora.py

Four local ranks simulate two nodes of two. The base has random weights here; load yours before `fully_shard`.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812

import zeropp

NODE_SIZE = 2
LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 2, 256, 4, 64, 32
LORA_RANK = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return torch.add(x, self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained product of two small matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, LORA_RANK, bias=False)
        self.b = nn.Linear(LORA_RANK, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)  # the model starts as the base

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.base(x), self.b(self.a(x)))


def add_lora(model: Gpt) -> None:
    model.requires_grad_(False)
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, linear in linears:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, LoraLinear(linear))


def sample(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences that count upwards, each with its own start and step."""
    start = torch.randint(VOCABULARY, (8, 1), generator=generator)
    step = torch.randint(1, 5, (8, 1), generator=generator)
    tokens = (start + step * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    torch.manual_seed(0)  # all ranks start with the same weights
    model = Gpt()
    add_lora(model)
    # Adapters and base share a unit. zeropp sends the trained and the frozen parameters of a unit separately.
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    zpp = zeropp.apply(model, zeropp.Config(node_size=NODE_SIZE))

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    if dist.get_rank() == 0:
        total, adapters = (sum(p.numel() for p in some) for some in (model.parameters(), trained))
        print(f"{total:,} parameters, {adapters:,} of them in adapters")
        print(
            f"{'step':>4} {'loss':>7} {'bytes across nodes':>19} {'16-bit FSDP2':>13}   (sent by each node)"
        )
    for step in range(1, steps + 1):
        zpp.ledger.reset()
        loss = model(*sample(generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        loss = loss.detach()
        dist.all_reduce(loss)
        # The ledger counts this rank's bytes. All ranks send equally many.
        sent = NODE_SIZE * zpp.ledger.total().across_bytes
        # FSDP2 gathers the whole unit in forward and backward, with the frozen weights.
        fsdp2 = NODE_SIZE * zpp.ledger.baseline_total().across_bytes
        if dist.get_rank() == 0 and (step <= 3 or step % 10 == 0):
            print(f"{step:>4} {loss.item() / dist.get_world_size():>7.4f} {sent:>19,} {fsdp2:>13,}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
