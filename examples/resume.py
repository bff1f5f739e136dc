"""Save a checkpoint, start again from it, and continue with bit-equal losses.

    torchrun --standalone --nproc-per-node 4 examples/resume.py

Four local ranks simulate two nodes of two. `Config.four_bit()` sends differences of weights and feeds errors
of gradients back, so zeropp has state that cannot be rebuilt from the weights. Each rank saves this state in
a file next to the sharded checkpoint. Without the file, training continues, too, but not bit for bit.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.optim import Optimizer

import zeropp

WIDTH, CLASSES, BATCH = 128, 16, 16


def build(seed: int) -> tuple[nn.Module, zeropp.ZeroPP, Optimizer]:
    torch.manual_seed(seed)  # all ranks start with the same weights
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, CLASSES))
    fully_shard(model[0])
    fully_shard(model)
    zpp = zeropp.apply(model, zeropp.Config.four_bit(node_size=2))
    return model, zpp, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> list[float]:
    """Return the losses of this rank."""
    losses = []
    for step in steps:
        # The data depends on step and rank only, so a checkpoint needs no position in it.
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        targets = torch.randint(CLASSES, (BATCH,), generator=generator)
        inputs = torch.randn(BATCH, WIDTH, generator=generator) + 4 * F.one_hot(targets, WIDTH)
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(folder: Path, model: nn.Module, zpp: zeropp.ZeroPP, optimizer: Optimizer) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)  # type: ignore[attr-defined]
    # zeropp's state belongs to its rank: DCP could not shard it again for another number of ranks.
    if zpp.has_history:
        torch.save(zpp.state_dict(), folder / f"zeropp-{dist.get_rank()}.pt")


def load(folder: Path, model: nn.Module, zpp: zeropp.ZeroPP, optimizer: Optimizer) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)  # type: ignore[attr-defined]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    zpp.invalidate()  # DCP wrote into the weights directly, which no hook of zeropp sees
    # Load zeropp's state after the weights: new weights reset it. A rank without a file passes None.
    file = folder / f"zeropp-{dist.get_rank()}.pt"
    zpp.load_state_dict(torch.load(file, weights_only=True) if file.exists() else None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "zeropp-resume")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(options.folder, ignore_errors=True)
    dist.barrier()

    first_half = range(options.steps // 2)
    second_half = range(options.steps // 2, options.steps)
    model, zpp, optimizer = build(seed=0)
    train(model, optimizer, first_half)
    save(options.folder, model, zpp, optimizer)
    uninterrupted = train(model, optimizer, second_half)

    # A new model with other weights stands for a new process: everything comes from the checkpoint.
    model, zpp, optimizer = build(seed=1)
    load(options.folder, model, zpp, optimizer)
    resumed = train(model, optimizer, second_half)

    if is_first:
        print("step  uninterrupted  resumed")
        for step, *losses in zip(second_half, uninterrupted, resumed, strict=True):
            print(f"{step + 1:>4}  {losses[0]:>13.9f}  {losses[1]:.9f}")
    assert resumed == uninterrupted, "the resumed run has other losses"
    dist.barrier()  # until all ranks have passed the assertion
    if is_first:
        print("the losses are equal bit for bit, on every rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
