"""What ranks do on the device with streams, with zeropp or with a copy of it that has a fault."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.streamed import device
from tests.training import batches, loss_of, make_net, mean_over_ranks


@dataclass
class Outcome:
    """What a job saw on one rank."""

    losses: list[float]
    conflicts: list[str]
    synchronizations: list[str]
    """From our code."""


def package(name: str, folder: str | None = None) -> Any:
    """The package of this name, from `folder` if one is given."""
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def folder_of(zeropp: Any) -> Path:
    return Path(zeropp.__file__).parent


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """One of few operators: DTensor thinks about each new one, for AdamW more than a second in all."""
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=True)


def train(
    where: str,
    config: dict[str, Any],
    *,
    steps: int = 3,
    micro_batches: int = 2,
    name: str = "zeropp",
    folder: str | None = None,
) -> Outcome:
    """Train a small FSDP2 model on device `where`; all but the last micro-batch stay inside the node."""
    zeropp = package(name, folder)
    net = make_net(device=where, mesh=init_device_mesh(where, (dist.get_world_size(),)))
    zpp = zeropp.apply(net, zeropp.Config(**config))
    optimizer = make_optimizer(net)
    data, losses = batches(), []
    with device.watch() as seen:
        for _ in range(steps):
            total = torch.zeros((), device=where)
            for micro_batch in range(micro_batches):
                zpp.set_requires_cross_node_sync(micro_batch == micro_batches - 1)
                loss = loss_of(net, next(data).to(where)) / micro_batches
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    means = [mean_over_ranks(loss.cpu()) for loss in losses]
    return Outcome(means, seen.conflicts, seen.synchronizations(folder_of(zeropp)))


def search(where: str) -> tuple[list[str], str | None, Outcome, Outcome]:
    """Let zeropp choose its Config on device `where`: among which, which one, and what the search saw and the
    steps after it."""
    zeropp = package("zeropp")
    net = make_net(device=where, mesh=init_device_mesh(where, (dist.get_world_size(),)))
    zpp = zeropp.apply(net, "auto")
    optimizer = make_optimizer(net)
    data = batches()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, next(data).to(where))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    outcomes = []
    for is_over in (False, True):
        losses: list[Tensor] = []
        # Whatever is chosen: two steps of each candidate, and not six.
        with device.watch() as seen, patch.multiple(zeropp._auto, WARM_UP_STEPS=1, TIMED_STEPS=1):
            while (zpp.search.chosen is not None) is is_over and len(losses) < (2 if is_over else 100):
                losses.append(step())
        means = [mean_over_ranks(loss.cpu()) for loss in losses]
        outcomes.append(Outcome(means, seen.conflicts, seen.synchronizations(folder_of(zeropp))))
    return list(zpp.search.candidates), zpp.search.chosen, *outcomes


def gather_on_two_streams(name: str = "zeropp", folder: str | None = None) -> Outcome:
    """Gather one unit on a stream, then on another. Only the node shard is common to both."""
    zeropp = package(name, folder)
    gather, _, shard = _comms_of_first_unit(zeropp)
    streams = [torch.Stream(device.NAME) for _ in range(3)]
    outputs = []
    with device.watch() as seen:
        for stream in streams:
            with stream:
                outputs.append(_gather(gather, shard))
    torch.accelerator.synchronize()
    losses = [float(output.sum()) for output in outputs]
    return Outcome(losses, seen.conflicts, seen.synchronizations(folder_of(zeropp)))


def _comms_of_first_unit(zeropp: Any) -> tuple[Any, Any, Tensor]:
    net = make_net(device=device.NAME, mesh=init_device_mesh(device.NAME, (dist.get_world_size(),)))
    zpp = zeropp.apply(net, zeropp.Config(node_size=2))
    gather, reduce = zpp.unit_comms[0].pair
    shard = torch.arange(1000.0).add(dist.get_rank()).to(device.NAME)
    gather.parameters = reduce.parameters = (1000,)
    return gather, reduce, shard


def gather_beside(name: str = "zeropp", folder: str | None = None, waits: bool = True) -> Outcome:
    """Gather asynchronously, and read what arrived: after a wait, or without. Every output is dropped before
    the next gather, which may get its memory."""
    zeropp = package(name, folder)
    gather, _, shard = _comms_of_first_unit(zeropp)
    sums = []
    with device.watch() as seen:
        for _ in range(3):
            output, work = _start(gather, shard, async_op=True)
            if waits:
                work.wait()
            sums.append(output.sum())
            del output, work
    torch.accelerator.synchronize()
    losses = [float(total) for total in sums]
    return Outcome(losses, seen.conflicts, seen.synchronizations(folder_of(zeropp)))


def _gather(gather: Any, shard: Tensor) -> Tensor:
    output, work = _start(gather, shard, async_op=False)
    if work is not None:
        work.wait()
    return output


def _start(gather: Any, shard: Tensor, async_op: bool) -> tuple[Tensor, Any]:
    size = dist.get_world_size()
    output: Tensor = gather.allocate([size * shard.numel()], dtype=shard.dtype, device=shard.device)
    own = output.view(size, -1)[dist.get_rank()]
    own.copy_(shard)
    return output, gather(output, own, dist.group.WORLD, async_op=async_op)


def change_weights_in_silence() -> str:
    """Train on, after an edit that nobody told zeropp of; the error that comes of it."""
    net, zeropp = _net_and_package()
    zpp = zeropp.apply(net, zeropp.Config(node_size=2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tokens = next(batches()).to(device.NAME)
    loss_of(net, tokens).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    loss_of(net, tokens).backward()  # type: ignore[no-untyped-call]  # node shards are fresh again
    with torch.no_grad():
        net.blocks[0].norm.weight.data.add_(1.0)  # on every rank, and no version moves
    try:
        for _ in range(2):  # the host learns of it when the device has got so far, not before
            loss_of(net, tokens).backward()  # type: ignore[no-untyped-call]
            device.finish()
            optimizer.step()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        zpp.invalidate()
    return "no error"


def gather_in_a_graph() -> str:
    """The error of a forward pass while streams are being captured."""
    net, zeropp = _net_and_package()
    zeropp.apply(net, zeropp.Config(node_size=2))
    tokens = next(batches()).to(device.NAME)
    try:
        with device.capturing():
            net(tokens)
    except RuntimeError as error:
        return str(error)
    return "no error"


def unshard_ahead() -> Outcome:
    """Evaluate with weights that were gathered ahead of time, asynchronously, and without."""
    net, zeropp = _net_and_package()
    zeropp.apply(net, zeropp.Config(node_size=2))
    tokens, losses = next(batches()).to(device.NAME), []
    with device.watch() as seen, torch.no_grad():
        losses.append(loss_of(net, tokens))
        for _ in range(2):
            handles = [block.unshard(async_op=True) for block in net.blocks]
            for handle in handles:
                handle.wait()
            losses.append(loss_of(net, tokens))
    return Outcome([loss.item() for loss in losses], seen.conflicts, seen.synchronizations(folder_of(zeropp)))


def _net_and_package() -> tuple[Any, Any]:
    mesh = init_device_mesh(device.NAME, (dist.get_world_size(),))
    return make_net(device=device.NAME, mesh=mesh), package("zeropp")
