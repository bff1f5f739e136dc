"""A small model with awkward shapes, and a training loop, for tests that run on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import zeropp

VOCABULARY, WIDTH, HIDDEN = 29, 20, 37  # primes, and nothing that divides by a world size


class Block(nn.Module):
    """Norm, two odd linear layers, a parameter with one element and one that is smaller than most worlds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.gate = nn.Parameter(torch.ones(1))
        self.mix = nn.Parameter(torch.ones(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        return torch.add(x, self.gate * self.mix.mean() * self.down(hidden))


class Net(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens.flatten())  # two dimensions throughout: FSDP2 warns about views as outputs
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def make_net(seed: int = 0, device: str = "cpu", **fully_shard_options: Any) -> Net:
    """A Net, sharded block by block, with the rest in the root unit."""
    torch.manual_seed(seed)
    net = Net().to(device)
    for block in net.blocks:
        fully_shard(block, **fully_shard_options)
    fully_shard(net, **fully_shard_options)
    return net


def batches(seed: int = 1) -> Iterator[Tensor]:
    """Endless batches of tokens, different on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    while True:
        yield torch.randint(VOCABULARY, (4, 9), generator=generator)


def loss_of(net: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(tokens[:, :-1]).float(), tokens[:, 1:].flatten())


def mean_over_ranks(value: Tensor) -> float:
    total = value.detach().double().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    # Fused where nothing else is asked for: it is one operator. DTensor thinks about each new one, for those
    # of the others more than a second on every new rank.
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adamw-loop": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


class Trainer:
    """Trains a net step by step. `config` None is plain FSDP2."""

    def __init__(
        self,
        config: zeropp.Config | None,
        *,
        net: Net | None = None,
        optimizer: str = "adamw-fused",
        micro_batches: int = 1,
        accumulate_in_node: bool = False,
    ) -> None:
        self.net = make_net() if net is None else net
        self.zpp = None if config is None else zeropp.apply(self.net, config)
        self.optimizer = OPTIMIZERS[optimizer](self.net.parameters())
        self.data = batches()
        self.micro_batches = micro_batches
        self.accumulate_in_node = accumulate_in_node

    def step(self) -> float:
        """One optimizer step; the mean loss over ranks and micro-batches."""
        self.optimizer.zero_grad()
        loss = self.backward()
        self.optimizer.step()
        return loss

    def backward(self) -> float:
        total = torch.zeros(())
        for micro_batch in range(self.micro_batches):
            if self.accumulate_in_node and self.zpp is not None:
                self.zpp.set_requires_cross_node_sync(micro_batch == self.micro_batches - 1)
            loss = loss_of(self.net, next(self.data)) / self.micro_batches
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return mean_over_ranks(total)

    def evaluate(self) -> float:
        with torch.inference_mode():
            return mean_over_ranks(loss_of(self.net, next(batches(seed=2))))

    def local_gradients(self) -> dict[str, Tensor]:
        cast(FSDPModule, self.net).reshard()  # after an evaluation the root is still gathered
        return {name: local(p.grad).clone() for name, p in self.net.named_parameters()}


def local(tensor: Any) -> Tensor:
    """This rank's part of a DTensor."""
    return tensor.to_local()  # type: ignore[no-any-return]


def losses_and_hops(
    make: Callable[[], Net], *configs: zeropp.Config | None, steps: int = 3
) -> list[tuple[list[float], set[str]]]:
    """Train the same model in several ways: the losses, and the hops that the ledger has seen."""
    outcomes = []
    for config in configs:
        trainer = Trainer(config, net=make())
        losses = [trainer.step() for _ in range(steps)]
        rows = [] if trainer.zpp is None else trainer.zpp.ledger.rows()
        outcomes.append((losses, {key.hop for key, _ in rows}))
    return outcomes
