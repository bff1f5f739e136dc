"""State dicts and DCP of models with zeropp in place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

import zeropp
from tests.ranks import Ranks
from tests.training import Net, Trainer, batches, loss_of

ON_2X2 = zeropp.Config(node_size=2)


def _save(folder: str) -> list[float]:
    trainer = Trainer(ON_2X2)
    for _ in range(3):
        trainer.step()
    model_state, optimizer_state = get_state_dict(trainer.net, trainer.optimizer)
    state_dict_saver.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return [trainer.evaluate()]


def _load(folder: str, node_size: int) -> tuple[float, float]:
    trainer = Trainer(zeropp.Config(node_size=node_size))
    trainer.step()  # other weights, and a node shard of them
    model_state, optimizer_state = get_state_dict(trainer.net, trainer.optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    state_dict_loader.load(state, checkpoint_id=folder)
    set_state_dict(
        trainer.net, trainer.optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    trainer.data = batches(5)
    with torch.inference_mode():
        loss = loss_of(trainer.net, _fixed_batch()).item()
    trainer.step()
    return loss, trainer.evaluate()


def _fixed_batch() -> Tensor:
    return torch.arange(36).view(4, 9) % 29


def _full_state_loss(folder: str) -> float:
    """The loss of the checkpoint in a plain, unsharded model."""
    net = Net()
    state = {"model": net.state_dict()}
    state_dict_loader.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    with torch.no_grad():
        return loss_of(net, _fixed_batch()).item()


def test_dcp_to_another_world_size(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    ranks.run(_save, folder)
    exact = ranks.run(_full_state_loss, folder, world=1)[0]
    for world, node_size in ((6, 2), (2, 1), (4, 4)):
        results = ranks.run(_load, folder, node_size, world=world)
        assert len({loss for loss, _ in results}) == 1
        assert results[0][0] == pytest.approx(exact, rel=0.01)


def _full_state_dict() -> bool:
    trainer = Trainer(ON_2X2)
    trainer.step()
    options = StateDictOptions(full_state_dict=True)
    model_state, optimizer_state = get_state_dict(trainer.net, trainer.optimizer, options=options)
    saved: dict[str, Any] = copy.deepcopy(model_state)
    trainer.step()
    set_state_dict(
        trainer.net,
        trainer.optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=options,
    )
    trainer.evaluate()  # would raise if the load had gone unnoticed
    now: dict[str, Any] = get_model_state_dict(trainer.net, options=options)
    return all(torch.equal(now[name], saved[name]) for name in saved)


def test_full_state_dict(ranks: Ranks) -> None:
    assert all(ranks.run(_full_state_dict))
