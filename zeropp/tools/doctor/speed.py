"""How fast: links and collectives, and a step of every strategy, in turns; then the advice, in words."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from ... import Ledger, apply
from ..._text import parameters
from ..bench.training import send_nothing
from ..bench.workload import loss_of
from ..models.loading import HUGGING_FACE, ModelConfig, build_model, check_fits, parameter_count, shape_of
from ..models.sharding import build_sharded
from ..plan.hardware import Cost, Hardware
from ..plan.recommend import PLAIN_NAMES, find_compared
from ..strategies import COMPUTE, Strategy
from .check import Check, Finding, Settings, StepTime, Visit
from .hardware import Size, measure
from .timer import Meter

WIDTHS = {"cpu": 512}
"""Width of the layers that compute is measured with, by device; others: 4096."""
MODELS = ("1.3B", "350M", "125M")
"""What a device with memory of its own is tried with: the first that fits."""
STATE_BYTES, MEMORY_SHARE = 16, 0.15
"""Bytes of a parameter: weights, gradients and Adam's two moments in fp32. And the share of a device's memory
that each of two models may take."""
WARM_UP, STEPS = 2, 3
"""Steps of a turn before, and while it is timed. The first sends all that is kept, and learns the order."""
SAME = 0.03
"""Steps whose times differ by less than this part are as fast as each other."""
LEARNING_RATE = 1e-4
PLAIN_TITLES = tuple(find_compared(name).title for name in PLAIN_NAMES)
ADVISED = ("Config()", "Config.four_bit()", "Config.wire16()", "Config.paper()")
"""The first of these that is as fast as the fastest is advised."""


def checks() -> Iterator[Check]:
    does = "times compute, codecs, each hop and FSDP2's own collectives, at several sizes"
    yield Check("speed", "links and codecs", does, _measure_hardware)
    yield Check("speed", "steps", "trains with every strategy, in turns, and times the steps", _measure_steps)


def _measure_hardware(visit: Visit) -> Finding:
    device, settings = visit.world.device, visit.settings
    width = settings.width or WIDTHS.get(device.type, 4096)
    size = Size(settings.micro_batch, settings.sequence, width)
    found = measure(size, device, visit.topology)
    visit.hardware = found.hardware
    if found.one_rank_gbit_s is None or found.hardware.link_gbit_s is None:
        across = "there is no link between nodes"
    else:
        rates = (found.hardware.link_gbit_s, found.one_rank_gbit_s)
        across = "a node sends {:,.3g} Gbit/s to others, one rank alone {:,.3g}".format(*rates)
    return Finding("ok", f"{len(found.points)} collectives; {across}")


@dataclass
class TimedStrategy:
    """A strategy, and what was measured of it."""

    strategy: Strategy
    seconds: list[float] = field(default_factory=list)
    """How long each timed step took."""
    ledger: Ledger | None = None
    """What the timed steps of a turn sent; None: FSDP2 by itself, which has no ledger."""

    @property
    def name(self) -> str:
        return self.strategy.title

    @property
    def milliseconds(self) -> float:
        return statistics.median(self.seconds) * 1e3

    def speedup(self, plain: TimedStrategy) -> float:
        """How many times faster than `plain` it is, by steps of the same round."""
        return statistics.median(
            theirs / own for own, theirs in zip(self.seconds, plain.seconds, strict=True)
        )

    def hidden(self, compute: TimedStrategy, hardware: Hardware | None) -> float | None:
        """How much of what its communication would take by itself is not seen in the step, if it is known."""
        if self.ledger is None or hardware is None:
            return None
        alone = 0.0
        for key, sent in self.ledger.rows():
            cost = _cost_of(hardware, key.collective, key.hop, self.is_plain)
            if cost is None:
                return None
            alone += sent.calls * cost.latency_us * 1e-6 + sent.wire_bytes * cost.ns_per_byte * 1e-9
        seen = (self.milliseconds - compute.milliseconds) * 1e-3
        return min(1.0, max(0.0, 1 - seen / (alone / STEPS))) if alone else None

    def across_bytes(self, ranks_per_node: int) -> float | None:
        """What a node sends to others in a step, if it was counted."""
        if self.ledger is None:
            return None
        return ranks_per_node * self.ledger.total().across_bytes / STEPS

    @property
    def is_plain(self) -> bool:
        """Whether FSDP2's own collectives send."""
        return self.strategy.config is None or self.strategy.config.weights == "none"


def _cost_of(hardware: Hardware, collective: str, hop: str, is_plain: bool) -> Cost | None:
    """The cost that was measured, if it was. On one kind of link a flat route is measured under the name of
    that."""
    pattern = "all_to_all" if collective == "reduce_scatter" and hop != "flat" else collective
    names = [f"{pattern} {level}" for level in (hop, "in-node", "across")]
    names = [f"{name} plain" for name in names] + names if is_plain else names
    return next((hardware.measured[name] for name in names if name in hardware.measured), None)


def _measure_steps(visit: Visit) -> Finding:
    settings, world = visit.settings, visit.world
    source = settings.model or _model_for(visit)
    context = None if source.startswith(HUGGING_FACE) else settings.sequence
    config = ModelConfig(source, context=context)
    trainers = [_Trainer(visit, build_sharded(config, 0, world.mesh)) for _ in range(2)]
    send_nothing(trainers[1].model)
    strategies, compute = [TimedStrategy(each) for each in _strategies(settings)], TimedStrategy(COMPUTE)
    for number in range(settings.rounds):
        there_and_back = strategies if number % 2 == 0 else strategies[::-1]  # so a drift is nobody's
        for timed in there_and_back:
            trainers[0].turn(timed)
        trainers[1].turn(compute)
    for timed in (*strategies, compute):
        timed.seconds = world.max(*timed.seconds)
    visit.steps = _step_times(strategies, compute, visit)
    visit.advice = advise(visit.steps)
    numel = parameters(parameter_count(trainers[0].model))
    return Finding(
        "ok",
        f"{source}, {numel} parameters, {settings.micro_batches} x {settings.micro_batch} x "
        f"{settings.sequence} tokens per rank and step; {settings.rounds} turns of {len(visit.steps)} "
        "strategies",
    )


def _strategies(settings: Settings) -> list[Strategy]:
    """Plain FSDP2, also as it accumulates gradients, if there is more than one micro-batch; every preset."""
    plain = PLAIN_NAMES if settings.micro_batches > 1 else PLAIN_NAMES[:1]
    return [
        *(find_compared(name) for name in plain),
        *(Strategy(name, name, config, sync="across") for name, config in settings.presets().items()),
    ]


def _model_for(visit: Visit) -> str:
    """The largest model of which two fit on this device; all ranks have the same device, or it is a fault."""
    if visit.world.device.type == "cpu":
        return "tiny"
    memory = torch.cuda.get_device_properties(visit.world.device).total_memory
    for name in MODELS:
        numel = parameter_count(build_model(ModelConfig(name), 0, device="meta"))
        if numel * STATE_BYTES / visit.world.size < MEMORY_SHARE * memory:
            return name
    return MODELS[-1]


class _Trainer:
    """A model, its optimizer and one batch."""

    def __init__(self, visit: Visit, model: nn.Module) -> None:
        settings, world = visit.settings, visit.world
        check_fits(model, sequence=settings.sequence, vocab_size=1)
        self.model = model
        # As by default on a GPU; on a CPU the default is a loop over DTensors, which takes longer.
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=True)
        self._micro_batches = settings.micro_batches
        self._meter = Meter(world.device, repeats=1)
        shape = (settings.micro_batch, settings.sequence + 1)
        tokens = torch.randint(shape_of(model).vocab_size, shape, generator=torch.Generator().manual_seed(0))
        self._tokens = tokens.to(world.device)

    def turn(self, timed: TimedStrategy) -> None:
        """Some steps of one strategy; afterwards the model is plain FSDP2's again."""
        zpp = None if timed.strategy.config is None else apply(self.model, timed.strategy.config)
        set_sync = timed.strategy.sync_switch(self.model, zpp)
        for _ in range(WARM_UP):
            self._step(set_sync)
        before = Ledger() if zpp is None else zpp.ledger.copy()
        for _ in range(STEPS):
            dist.barrier()
            timed.seconds.append(self._meter.timed(lambda: self._step(set_sync)))
        if zpp is not None:
            timed.ledger = zpp.ledger.since(before)
            zpp.remove()

    def _step(self, set_sync: Callable[[bool], object]) -> None:
        for micro_batch in range(self._micro_batches):
            set_sync(micro_batch == self._micro_batches - 1)
            loss = loss_of(self.model(self._tokens[:, :-1]).float(), self._tokens[:, 1:])
            (loss / self._micro_batches).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()


def _step_times(strategies: list[TimedStrategy], compute: TimedStrategy, visit: Visit) -> list[StepTime]:
    """Plain FSDP2 first, then the presets, then compute alone."""
    plain, (*_, as_off) = strategies[0], (timed for timed in strategies if timed.strategy.config is None)
    # Config.off() sends and counts the same.
    as_off.ledger = next(timed.ledger for timed in strategies if timed.name == "Config.off()")
    ranks_per_node = visit.world.size // len(visit.topology.nodes)
    times = [
        StepTime(
            timed.name,
            timed.milliseconds,
            timed.speedup(plain),
            timed.across_bytes(ranks_per_node),
            timed.hidden(compute, visit.hardware),
        )
        for timed in strategies
    ]
    return [*times, StepTime(COMPUTE.title, compute.milliseconds, compute.speedup(plain), 0.0, None)]


def advise(steps: Sequence[StepTime]) -> list[str]:
    """Which Config, how much faster, and why; or that plain FSDP2 is as good.

    Config.off() is plain FSDP2, too, bit for bit: by how much their times differ is noise, and what is no
    further apart than that is as fast."""
    by_name = {step.name: step for step in steps}
    *_, repeated = plain_ones = [step for step in steps if step.name in PLAIN_TITLES]
    plain = max(plain_ones, key=lambda step: step.speedup)
    noise = abs(by_name["Config.off()"].speedup / repeated.speedup - 1)
    margin = 1 + max(SAME, noise)
    fastest = max(by_name[name].speedup for name in ADVISED)
    best = next(by_name[name] for name in ADVISED if by_name[name].speedup * margin >= fastest)
    waits = max(0.0, 1 - by_name[COMPUTE.title].milliseconds / plain.milliseconds)
    why = f"{waits:.0%} of plain FSDP2's step is not compute"
    ratio = f"{best.speedup / plain.speedup:.2f}x as fast as plain FSDP2, step for step"
    times = f"{best.milliseconds:,.0f} ms and {plain.milliseconds:,.0f} ms in the median"
    sure = f"two measurements of plain FSDP2 differ by {noise:.0%}"
    if best.speedup < margin * plain.speedup:
        return [f"Plain FSDP2 is as good here: zeropp.{best.name} is {ratio} ({times}); {why}; {sure}."]
    if best.across_bytes is not None and plain.across_bytes:
        why += f", and of what that sends across nodes {best.across_bytes / plain.across_bytes:.0%} is left"
    return [f"Use zeropp.{best.name}, {ratio} ({times}); {why}; {sure}."]
