"""Lightning's Trainer and Fabric on real gloo ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import zeropp
from tests.configs import CONFIGS
from tests.integrations.environment import set_environment
from tests.ranks import Ranks, on_a_rank

if TYPE_CHECKING or on_a_rank():
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricStrategy
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    from zeropp.integrations.lightning import ZeroppCallback, parallelize

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()
            self.losses: list[float] = []
            self.times_configured = 0

        def configure_model(self) -> None:
            if self.times_configured == 0:
                shard(self.net, self.device_mesh)  # type: ignore[arg-type]
            self.times_configured += 1

        def training_step(self, batch: Tensor) -> Tensor:
            loss = self.net(batch[0]).square().mean()
            self.losses.append(float(loss.detach()))
            return loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())  # type: ignore[no-any-return]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(64, 8))


def shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for block in list(model)[:-1]:
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def data(rank: int, batches: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 64, generator=generator) for _ in range(batches)]


def _fit(config: zeropp.Config | None, accumulate: int) -> tuple[list[float], float]:
    """Return the losses, and the bytes across nodes per parameter and step."""
    set_environment()
    callback = None if config is None else ZeroppCallback(config)
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1),
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=[] if callback is None else [callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        gradient_clip_val=1.0,
    )
    module = Module()
    trainer.fit(module, DataLoader(data(dist.get_rank()), batch_size=1))  # type: ignore[arg-type]
    sent = 0.0
    if callback is not None:
        assert callback.zpp is not None
        steps = trainer.global_step
        parameters = sum(p.numel() for p in module.parameters())
        sent = 2 * callback.zpp.ledger.total().across_bytes / parameters / steps
    return module.losses, sent


@pytest.mark.parametrize("accumulate", [1, 3])  # 3: the last step of eight batches has two
def test_trainer(ranks: Ranks, accumulate: int) -> None:
    """Lightning alone reduces every micro-batch. The callback accumulates first, so sums are rounded once."""
    plain = ranks.run(_fit, None, accumulate)
    off = ranks.run(_fit, zeropp.Config.off(), accumulate)
    default = ranks.run(_fit, CONFIGS["default"], accumulate)
    for (exact, _), (same, _), (close, sent) in zip(plain, off, default, strict=True):
        assert same == exact if accumulate == 1 else same == pytest.approx(exact, rel=1e-5)
        assert close == pytest.approx(exact, rel=0.03)
        assert 0.5 < sent < 0.85


def _fabric(config: zeropp.Config | None) -> tuple[list[float], int]:
    """Return the losses of steps of two micro-batches, and how often gradients were not in `.grad` yet."""
    set_environment()
    function = shard if config is None else parallelize(shard, config)
    strategy = FabricStrategy(function, data_parallel_size=4, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy)
    fabric.launch()
    model: Any = fabric.setup(make_model())
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    losses, held = [], 0
    for number, batch in enumerate(data(dist.get_rank())):
        is_last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = model(batch).square().mean()
            fabric.backward(loss)
        held += any(p.grad is None for p in model.parameters())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, held


def test_fabric(ranks: Ranks) -> None:
    plain = ranks.run(_fabric, None)
    assert ranks.run(_fabric, zeropp.Config.off()) == plain
    for (close, held), (exact, held_plain) in zip(ranks.run(_fabric, CONFIGS["default"]), plain, strict=True):
        assert close == pytest.approx(exact, rel=0.03)
        assert (held, held_plain) == (0, 4)  # zeropp holds them in the node, FSDP2 whole on every rank
