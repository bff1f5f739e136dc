"""Frozen bases with adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zeropp
from tests.configs import CONFIGS
from tests.ranks import Ranks
from tests.training import Block, Net, Trainer, losses_and_hops

ON_2X2 = zeropp.Config(node_size=2)


class _Adapter(nn.Module):
    """A frozen linear layer with a small trainable correction."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(3, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return out


def lora(base_in_units_of_its_own: bool = False) -> Net:
    torch.manual_seed(0)
    net = Net()
    net.requires_grad_(False)
    for block in net.blocks:
        assert isinstance(block, Block)
        block.up = _Adapter(block.up)  # type: ignore[assignment]
        block.down = _Adapter(block.down)  # type: ignore[assignment]
        if base_in_units_of_its_own:
            fully_shard(block.up.base)  # type: ignore[arg-type]
            fully_shard(block.down.base)  # type: ignore[arg-type]
        fully_shard(block)
    fully_shard(net)
    return net


def _lora_run() -> dict[str, Any]:
    (plain, _), (ours, _) = losses_and_hops(lora, None, ON_2X2, steps=6)
    result: dict[str, Any] = {"plain": plain, "ours": ours}
    trainer = Trainer(ON_2X2, net=lora())
    for _ in range(3):
        trainer.step()
    assert trainer.zpp is not None
    ledger = trainer.zpp.ledger
    for unit in ("(root)", "blocks.0"):
        result[unit] = ledger.total(unit=unit, collective="all_gather", hop="across").calls
    return result


def test_adapters_on_a_frozen_base(ranks: Ranks) -> None:
    for result in ranks.run(_lora_run):
        assert result["ours"] == pytest.approx(result["plain"], rel=0.01)
        assert result["(root)"] == 1  # frozen: embeddings and head cross nodes once
        assert result["blocks.0"] == 1 + 3  # the base once, adapters in every step


def _base_in_units_of_its_own(name: str) -> tuple[dict[str, int], int, int]:
    """Calls across nodes by unit, and bytes of the weights across nodes in the first step and in the last."""
    trainer = Trainer(CONFIGS[name], net=lora(base_in_units_of_its_own=True))
    assert trainer.zpp is not None
    ledger, sent = trainer.zpp.ledger, [0]
    for _ in range(4):
        trainer.step()
        sent.append(ledger.total(collective="all_gather", hop="across").wire_bytes)
    units = ("(root)", "blocks.0", "blocks.0.up.base", "blocks.1.down.base")
    calls = {unit: ledger.total(unit=unit, collective="all_gather", hop="across").calls for unit in units}
    return calls, sent[1] - sent[0], sent[-1] - sent[-2]


@pytest.mark.parametrize("name", ["default", "four_bit"])
def test_a_frozen_base_crosses_nodes_once_per_run(ranks: Ranks, name: str) -> None:
    for calls, first, last in ranks.run(_base_in_units_of_its_own, name):
        # Frozen norms of the blocks once, adapters in every step.
        assert calls == {"(root)": 1, "blocks.0": 1 + 4, "blocks.0.up.base": 1, "blocks.1.down.base": 1}
        assert 0 < last < 0.25 * first  # adapters are so small that half of them are sent as they are
