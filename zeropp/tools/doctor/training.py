"""A small GPT under every preset, against plain FSDP2 and against itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ... import Config, StaleWeightsError, ZeroPP, apply
from ..bench.workload import loss_of
from ..models.gpt import GPT, GPTConfig
from ..models.sharding import shard
from .check import Check, Finding, Settings, Visit

SMALL = GPTConfig(layers=2, width=64, heads=2, context=32)
STEPS, MICRO_BATCHES, SEQUENCES = 4, 2, 2
LEARNING_RATE = 1e-3
LOSS_TOLERANCE = 0.05
"""How far a preset's loss may be from plain FSDP2's in these steps. It begins at 5.5."""
GRADIENT_TOLERANCE = 0.35
"""How far a preset's gradients may be from the mean, relative to it: four bits are. A sum that should be a
mean, or another rank's row, is off by 1 or more."""
EXACT_TOLERANCE = 1e-5
"""The same, for gradients that are sent as fp32."""


def checks(settings: Settings) -> Iterator[Check]:
    here = partial(Check, "training")
    does = f"{STEPS} steps with each: losses and weights, bit for bit"
    yield here("Config.off() is plain FSDP2", does, _off_is_plain)
    does = f"{STEPS} steps with and without it: losses and weights, bit for bit"
    yield here("the node shard changes nothing", does, _node_shard_changes_nothing)
    does = f"{STEPS} steps: losses beside plain FSDP2's, gradients beside their mean; a NaN on one rank"
    for name, config in settings.presets().items():
        yield here(f"{name} trains", does, partial(_trains, config))
    does = "changes weights in place, which must be sent anew, and behind FSDP2's back, which must raise"
    yield here("changed weights are noticed", does, _changes_are_noticed)
    does = "counts the bytes of all tensors before apply() and after remove()"
    yield here("remove() gives all memory back", does, _memory_comes_back)


@dataclass(frozen=True)
class Run:
    """What came of some steps."""

    losses: Tensor
    """This rank's, in fp64."""
    weights: list[Tensor]
    """This rank's shards after all steps."""
    first_gradients: list[Tensor]
    """Those of the whole model, in the first step."""
    nans: list[Tensor]
    """Where gradients of the whole model are NaN after a step in which the last rank's loss was."""


class Training:
    """The small GPT in training. `config` None: plain FSDP2."""

    def __init__(self, visit: Visit, config: Config | None) -> None:
        self._visit = visit
        with torch.device("meta"):
            model = GPT(SMALL)
        self.model = shard(model, visit.world.mesh, precision="fp32")
        self.zpp: ZeroPP | None = None if config is None else apply(self.model, config)
        # As by default on a GPU; on a CPU the default is a loop over DTensors, which takes longer.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, foreach=True)
        self._batches = batches(visit)

    def backward(self, factor: float = 1.0) -> float:
        """Forward and backward of a step, across nodes in the last micro-batch; the loss of this rank."""
        total = 0.0
        for micro_batch in range(MICRO_BATCHES):
            is_last = micro_batch == MICRO_BATCHES - 1
            if self.zpp is None:
                cast(FSDPModule, self.model).set_requires_gradient_sync(is_last)
            else:
                self.zpp.set_requires_cross_node_sync(is_last)
            loss = small_loss(self.model, next(self._batches)) / MICRO_BATCHES
            (loss * factor).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def finish_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self) -> Run:
        losses, first = [self.backward()], self._gradients()
        self.finish_step()
        for _ in range(STEPS - 1):
            losses.append(self.backward())
            self.finish_step()
        weights = [local(parameter) for parameter in self.model.parameters()]
        is_last_rank = self._visit.world.rank == self._visit.world.size - 1
        self.backward(factor=float("nan") if is_last_rank else 1.0)
        nans = [gradient.isnan() for gradient in self._gradients()]
        return Run(torch.tensor(losses, dtype=torch.float64), weights, first, nans)

    def _gradients(self) -> list[Tensor]:
        return [cast(Any, parameter.grad).full_tensor() for parameter in self.model.parameters()]


def batches(visit: Visit) -> Iterator[Tensor]:
    """Endless, and others on every rank."""
    generator = torch.Generator().manual_seed(visit.world.rank)
    while True:
        tokens = torch.randint(SMALL.vocab_size, (SEQUENCES, SMALL.context + 1), generator=generator)
        yield tokens.to(visit.world.device)


def small_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return loss_of(model(tokens[:, :-1]), tokens[:, 1:])


def local(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local()
    return part.detach().clone()


@lru_cache(maxsize=8)  # several checks look at one run; all ranks ask for the same ones in the same order
def _run(visit: Visit, config: Config | None) -> Run:
    return Training(visit, config).run()


def _off_is_plain(visit: Visit) -> Finding:
    return _compare(visit, None, visit.settings.presets()["Config.off()"], "plain FSDP2")


def _node_shard_changes_nothing(visit: Visit) -> Finding:
    if visit.topology.is_one_node:
        return Finding("not run", "there is no node shard: all ranks are on one node", "run it on two nodes")
    config = visit.settings.presets()["Config()"]
    return _compare(visit, config, replace(config, secondary=False), "Config()")


def _compare(visit: Visit, first: Config | None, second: Config, name: str) -> Finding:
    """Whether both train alike: to the last bit, or as far as the first one does so twice."""
    expected, again, seen = _run(visit, first), Training(visit, first).run(), _run(visit, second)
    own, difference = _distance(expected, again), _distance(expected, seen)
    if not difference <= own:
        return Finding(
            "fault",
            f"differ by {difference:.2g}; two runs of {name} by {own:.2g}",
            "report it with this table",
        )
    if own == 0.0:
        return Finding("ok", "losses and weights are the same to the last bit")
    return Finding("ok", f"differ by {difference:.2g}, which is no more than {name} from itself, {own:.2g}")


def _distance(first: Run, second: Run) -> float:
    """The largest difference of any loss or weight."""
    pairs = zip((first.losses, *first.weights), (second.losses, *second.weights), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel())


def _trains(config: Config, visit: Visit) -> Finding:
    plain, seen = _run(visit, None), _run(visit, config)
    error = _relative_error(seen.first_gradients, mean_gradients(visit))
    if not error < (EXACT_TOLERANCE if config.gradients_across == "none" else GRADIENT_TOLERANCE):
        return Finding("fault", f"gradients are off their mean by {error:.2g} of it", "do not train with it")
    pairs = zip(plain.nans, seen.nans, strict=True)
    if lost := sum(int((expected & ~arrived).sum()) for expected, arrived in pairs):
        return Finding(
            "fault",
            f"of a NaN on the last rank, {lost} gradients are finite that are NaN under plain FSDP2",
            "loss scaling would miss overflows: use Config.off(), and report it",
        )
    far = float((seen.losses - plain.losses).abs().max())
    if not far < LOSS_TOLERANCE:
        return Finding("fault", f"the loss is off plain FSDP2's by {far:.3g}", "do not train with it")
    return Finding("ok", f"loss within {far:.1g} of plain FSDP2, gradients within {error:.1g}; NaN arrives")


@lru_cache(maxsize=1)  # the same for every preset
def mean_gradients(visit: Visit) -> list[Tensor]:
    """What the first step's gradients must be: from a whole model on each rank, and a sum in fp64."""
    model = GPT(SMALL).to(visit.world.device)
    model.reset_parameters()  # generators of this device, as for the sharded ones
    data = batches(visit)
    for _ in range(MICRO_BATCHES):
        (small_loss(model, next(data)) / MICRO_BATCHES).backward()  # type: ignore[no-untyped-call]
    means = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        mean = parameter.grad.double()
        dist.all_reduce(mean)
        means.append(mean / visit.world.size)
    return means


def _relative_error(seen: list[Tensor], expected: list[Tensor]) -> float:
    """The length of the difference over the length, of all gradients together."""
    pairs = list(zip(seen, expected, strict=True))
    difference = sum(float((a.double() - b).square().sum()) for a, b in pairs)
    return float((difference / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5)


def _changes_are_noticed(visit: Visit) -> Finding:
    if visit.topology.is_one_node:
        return Finding("not run", "nothing is kept that could be stale: all ranks are on one node")
    training = Training(visit, visit.settings.presets()["Config()"])
    zpp, model = training.zpp, training.model
    assert zpp is not None
    training.backward()
    training.finish_step()
    tokens = next(batches(visit))
    before = _evaluate(model, tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    after = _evaluate(model, tokens)
    zpp.invalidate()
    is_sent_anew = before != after == _evaluate(model, tokens)
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    raises = _raises_when_stale(cast(FSDPModule, cast(Any, model).blocks[0]), zpp)
    if not is_sent_anew or not raises:  # not before both: the others are still in a gather
        what = "behind FSDP2's back raise nothing" if is_sent_anew else "in place are not sent anew"
        return Finding("fault", f"weights that were changed {what}", "call invalidate() after each change")
    return Finding("ok", "changed in place: sent anew; behind FSDP2's back: StaleWeightsError")


def _evaluate(model: nn.Module, tokens: Tensor) -> float:
    with torch.no_grad():
        return float(small_loss(model, tokens))


def _raises_when_stale(unit: FSDPModule, zpp: ZeroPP) -> bool:
    """Gathers one unit, which changed on all ranks. A CPU raises there; a device with streams is asked for
    what it has found by `summary()`, after the gather, so that no rank is left alone in one."""
    try:
        unit.unshard()
        zpp.summary()
    except StaleWeightsError:
        return True
    return False


def _memory_comes_back(visit: Visit) -> Finding:
    training = Training(visit, None)
    training.backward()
    training.finish_step()
    before = live_bytes(visit.world.device)
    training.zpp = apply(training.model, visit.settings.presets()["Config.four_bit()"])
    for _ in range(2):
        training.backward()
        training.finish_step()
    during = training.zpp.communication_bytes
    training.zpp.remove()
    training.zpp = None
    after = live_bytes(visit.world.device)
    if after != before:
        return Finding(
            "fault", f"{after - before:,} bytes more than before; {during:,} were kept", "report it"
        )
    return Finding("ok", f"{before:,} bytes before and after; {during:,} were kept in between")


def live_bytes(device: torch.device) -> int:
    """Bytes of all tensors that there are: from CUDA's allocator, or of all that Python knows."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        if type(found) in (Tensor, nn.Parameter) and found.device.type == device.type:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
