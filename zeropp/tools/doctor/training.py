"""Checks of training: a small GPT with every preset, compared with plain FSDP2 and with itself."""

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
from .check import Check, CheckResult, DoctorSettings, Session

SMALL = GPTConfig(layers=2, width=64, heads=2, context=32)
STEPS, MICRO_BATCHES, SEQUENCES = 4, 2, 2
LEARNING_RATE = 1e-3
LOSS_TOLERANCE = 0.05
"""Largest difference of a preset's loss from plain FSDP2's in these steps. The loss begins at 5.5."""
GRADIENT_TOLERANCE = 0.35
"""Largest relative error of a preset's gradients, which allows for four bits. A sum instead of a mean, or a
row of another rank, has an error of 1 or more."""
EXACT_TOLERANCE = 1e-5
"""Largest relative error of gradients that are sent in fp32."""


def checks(settings: DoctorSettings) -> Iterator[Check]:
    here = partial(Check, "training")
    does = f"losses and weights of {STEPS} steps with each, bit for bit"
    yield here("Config.off() is plain FSDP2", does, _off_is_plain)
    does = f"losses and weights of {STEPS} steps with and without it, bit for bit"
    yield here("the node shard changes nothing", does, _node_shard_changes_nothing)
    does = f"{STEPS} steps: losses against plain FSDP2's, gradients against their mean; a NaN on one rank"
    for name, config in settings.presets().items():
        yield here(f"{name} trains", does, partial(_trains, config))
    does = "changes in place must be sent again, changes through .data must raise"
    yield here("changed weights are noticed", does, _changes_are_noticed)
    does = "bytes of all tensors before apply() and after remove()"
    yield here("remove() gives all memory back", does, _memory_comes_back)


@dataclass(frozen=True)
class Outcome:
    """Losses, weights and gradients of some steps."""

    losses: Tensor
    """Losses of this rank, in fp64."""
    weights: list[Tensor]
    """Shards of this rank after all steps."""
    first_gradients: list[Tensor]
    """Gradients of the whole model in the first step."""
    nans: list[Tensor]
    """NaN masks of the whole model's gradients after a step with a NaN loss on the last rank."""


class SmallTraining:
    """A training of the small GPT, with a Config, or with plain FSDP2 if `config` is None."""

    def __init__(self, session: Session, config: Config | None) -> None:
        self._world = session.world
        with torch.device("meta"):
            model = GPT(SMALL)
        self.model = shard(model, session.world.mesh, precision="fp32")
        self.zpp: ZeroPP | None = None if config is None else apply(self.model, config)
        # foreach is the default on a GPU. The default on a CPU is a slower loop over DTensors.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, foreach=True)
        self._batches = batches(session)

    def backward(self, factor: float = 1.0) -> float:
        """Run forward and backward of a step, with cross-node sync at its end, and return the loss."""
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

    def run(self) -> Outcome:
        losses, first = [self.backward()], self._gradients()
        self.finish_step()
        for _ in range(STEPS - 1):
            losses.append(self.backward())
            self.finish_step()
        weights = [local(parameter) for parameter in self.model.parameters()]
        is_last_rank = self._world.rank == self._world.size - 1
        self.backward(factor=float("nan") if is_last_rank else 1.0)
        nans = [gradient.isnan() for gradient in self._gradients()]
        return Outcome(torch.tensor(losses, dtype=torch.float64), weights, first, nans)

    def _gradients(self) -> list[Tensor]:
        return [cast(Any, parameter.grad).full_tensor() for parameter in self.model.parameters()]


def batches(session: Session) -> Iterator[Tensor]:
    """Yield random batches without end, different ones on every rank."""
    generator = torch.Generator().manual_seed(session.world.rank)
    while True:
        tokens = torch.randint(SMALL.vocab_size, (SEQUENCES, SMALL.context + 1), generator=generator)
        yield tokens.to(session.world.device)


def small_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return loss_of(model(tokens[:, :-1]), tokens[:, 1:])


def local(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local()
    return part.detach().clone()


@lru_cache(maxsize=8)
def _outcome(session: Session, config: Config | None) -> Outcome:
    """Train with `config`. Several checks share an outcome; the cache hits are the same on all ranks."""
    return SmallTraining(session, config).run()


def _off_is_plain(session: Session) -> CheckResult:
    return _compare(session, None, session.settings.presets()["Config.off()"], "plain FSDP2")


def _node_shard_changes_nothing(session: Session) -> CheckResult:
    if session.topology.is_one_node:
        return CheckResult("not run", "no node shard: all ranks are on one node", "run it on two nodes")
    config = session.settings.presets()["Config()"]
    return _compare(session, config, replace(config, secondary=False), "Config()")


def _compare(session: Session, first: Config | None, second: Config, name: str) -> CheckResult:
    """Compare two trainings: they must be equal, or differ no more than two runs of the first one."""
    expected, again, seen = (
        _outcome(session, first),
        SmallTraining(session, first).run(),
        _outcome(session, second),
    )
    noise, difference = _distance(expected, again), _distance(expected, seen)
    saw = f"losses and weights differ by {difference:.2g}, two runs of {name} by {noise:.2g}"
    if not difference <= noise:
        return CheckResult("fault", saw, "report it with this table")
    return CheckResult("ok", saw if noise else "losses and weights are equal bit for bit")


def _distance(first: Outcome, second: Outcome) -> float:
    """Return the largest difference of any loss or weight."""
    pairs = zip((first.losses, *first.weights), (second.losses, *second.weights), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel())


def _trains(config: Config, session: Session) -> CheckResult:
    plain, seen = _outcome(session, None), _outcome(session, config)
    error = _relative_error(seen.first_gradients, mean_gradients(session))
    if not error < (EXACT_TOLERANCE if config.gradients_across == "none" else GRADIENT_TOLERANCE):
        return CheckResult("fault", f"gradients have a relative error of {error:.2g}", "do not train with it")
    pairs = zip(plain.nans, seen.nans, strict=True)
    if lost := sum(int((expected & ~arrived).sum()) for expected, arrived in pairs):
        return CheckResult(
            "fault",
            f"after a NaN on the last rank, {lost} gradients are finite that are NaN with plain FSDP2",
            "loss scaling would miss overflows: use Config.off(), and report it",
        )
    far = float((seen.losses - plain.losses).abs().max())
    if not far < LOSS_TOLERANCE:
        return CheckResult(
            "fault", f"the loss differs from plain FSDP2's by {far:.3g}", "do not train with it"
        )
    return CheckResult(
        "ok", f"loss within {far:.1g} of plain FSDP2, gradients within {error:.1g}, NaN preserved"
    )


@lru_cache(maxsize=1)  # the same gradients for every preset
def mean_gradients(session: Session) -> list[Tensor]:
    """Return the exact gradients of the first step: from unsharded models, averaged in fp64."""
    model = GPT(SMALL).to(session.world.device)
    model.reset_parameters()  # with this device's random generator, as the sharded models
    data = batches(session)
    for _ in range(MICRO_BATCHES):
        (small_loss(model, next(data)) / MICRO_BATCHES).backward()  # type: ignore[no-untyped-call]
    means = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        mean = parameter.grad.double()
        dist.all_reduce(mean)
        means.append(mean / session.world.size)
    return means


def _relative_error(seen: list[Tensor], expected: list[Tensor]) -> float:
    """Return the norm of the difference divided by the norm, over all gradients together."""
    pairs = list(zip(seen, expected, strict=True))
    difference = sum(float((a.double() - b).square().sum()) for a, b in pairs)
    return float((difference / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5)


def _changes_are_noticed(session: Session) -> CheckResult:
    if session.topology.is_one_node:
        return CheckResult("not run", "no weights can be stale: all ranks are on one node")
    training = SmallTraining(session, session.settings.presets()["Config()"])
    zpp, model = training.zpp, training.model
    assert zpp is not None
    training.backward()
    training.finish_step()
    tokens = next(batches(session))
    before = _evaluate(model, tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    after = _evaluate(model, tokens)
    zpp.invalidate()
    is_sent_again = before != after == _evaluate(model, tokens)
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    raises = _raises_when_stale(cast(FSDPModule, cast(Any, model).blocks[0]), zpp)
    if not is_sent_again or not raises:  # after both, because the other ranks take part in both gathers
        what = "through .data raise no error" if is_sent_again else "in place are not sent again"
        return CheckResult("fault", f"changes {what}", "call invalidate() after each change")
    return CheckResult("ok", "changes in place are sent again, changes through .data raise")


def _evaluate(model: nn.Module, tokens: Tensor) -> float:
    with torch.no_grad():
        return float(small_loss(model, tokens))


def _raises_when_stale(unit: FSDPModule, zpp: ZeroPP) -> bool:
    """Gather one unit, which changed on all ranks, and return whether that raises.

    A CPU raises in the gather. With streams, `summary()` raises after it, so every rank completes the
    gather."""
    try:
        unit.unshard()
        zpp.summary()
    except StaleWeightsError:
        return True
    return False


def _memory_comes_back(session: Session) -> CheckResult:
    training = SmallTraining(session, None)
    training.backward()
    training.finish_step()
    before = live_bytes(session.world.device)
    training.zpp = apply(training.model, session.settings.presets()["Config.four_bit()"])
    for _ in range(2):
        training.backward()
        training.finish_step()
    during = training.zpp.communication_bytes
    training.zpp.remove()
    training.zpp = None
    after = live_bytes(session.world.device)
    if after != before:
        return CheckResult(
            "fault", f"{after - before:,} bytes remain after remove(); zeropp had {during:,}", "report it"
        )
    return CheckResult("ok", f"{before:,} bytes before and after; zeropp had {during:,}")


def live_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors: from CUDA's allocator, or of those that Python's `gc` finds."""
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
