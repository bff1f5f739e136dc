"""Measurements of links, collectives and steps of every strategy, with advice."""

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
from .check import Check, CheckResult, DoctorSettings, Session, StepTime
from .hardware import Size, measure
from .timer import Timer

WIDTHS = {"cpu": 512}
"""Width of the layers on which compute is measured, by device. Other devices: 4096."""
MODELS = ("1.3B", "350M", "125M")
"""Models for a device with its own memory. The first that fits is used."""
STATE_BYTES, MEMORY_SHARE = 16, 0.15
"""Bytes per parameter (weights, gradients and Adam's two moments in fp32), and the share of a device's memory
for each of two models."""
WARM_UP, STEPS = 2, 3
"""Untimed and timed steps per turn. The first step fills the node shards and records the order of units."""
SAME = 0.03
"""Relative difference of step times that counts as none."""
LEARNING_RATE = 1e-4
PLAIN_TITLES = tuple(find_compared(name).title for name in PLAIN_NAMES)
ADVISED = ("Config()", "Config.four_bit()", "Config.wire16()", "Config.paper()")
"""Presets by preference. The first that is as fast as the fastest of them is recommended."""


def checks() -> Iterator[Check]:
    does = "times of compute, codecs, each hop and FSDP2's own collectives, at several sizes"
    yield Check("speed", "links and codecs", does, _measure_hardware)
    yield Check("speed", "steps", "times of steps with every strategy, in turns", _measure_steps)


def _measure_hardware(session: Session) -> CheckResult:
    device, settings = session.world.device, session.settings
    width = settings.width or WIDTHS.get(device.type, 4096)
    size = Size(settings.micro_batch, settings.sequence, width)
    found = measure(size, device, session.topology)
    session.hardware = found.hardware
    if found.one_rank_gbit_s is None or found.hardware.link_gbit_s is None:
        across = "no link between nodes"
    else:
        rates = (found.hardware.link_gbit_s, found.one_rank_gbit_s)
        across = "a node sends {:,.3g} Gbit/s to others, one rank alone {:,.3g}".format(*rates)
    return CheckResult("ok", f"{len(found.points)} collectives; {across}")


@dataclass
class TimedStrategy:
    """A strategy with its measurements."""

    strategy: Strategy
    seconds: list[float] = field(default_factory=list)
    """Times of the timed steps."""
    ledger: Ledger | None = None
    """Ledger of the timed steps of a turn; None for FSDP2 without zeropp."""

    @property
    def name(self) -> str:
        return self.strategy.title

    @property
    def milliseconds(self) -> float:
        return statistics.median(self.seconds) * 1e3

    def speedup(self, plain: TimedStrategy) -> float:
        """Return the median ratio of `plain`'s step times to these, step by step."""
        return statistics.median(
            theirs / own for own, theirs in zip(self.seconds, plain.seconds, strict=True)
        )

    def hidden(self, compute: TimedStrategy, hardware: Hardware | None) -> float | None:
        """Return the fraction of the communication time that compute hides, or None if it is unknown."""
        if self.ledger is None or hardware is None:
            return None
        sent_seconds = 0.0  # of all steps, without overlap
        for key, sent in self.ledger.rows():
            cost = _cost_of(hardware, key.collective, key.hop, self.is_plain)
            if cost is None:
                return None
            sent_seconds += sent.calls * cost.latency_us * 1e-6 + sent.wire_bytes * cost.ns_per_byte * 1e-9
        exposed = (self.milliseconds - compute.milliseconds) * 1e-3
        return min(1.0, max(0.0, 1 - exposed / (sent_seconds / STEPS))) if sent_seconds else None

    def across_bytes(self, ranks_per_node: int) -> float | None:
        """Return the bytes that a node sends to others in a step, or None if they were not counted."""
        if self.ledger is None:
            return None
        return ranks_per_node * self.ledger.total().across_bytes / STEPS

    @property
    def is_plain(self) -> bool:
        """Whether it uses FSDP2's own collectives."""
        return self.strategy.config is None or self.strategy.config.weights == "none"


def _cost_of(hardware: Hardware, collective: str, hop: str, is_plain: bool) -> Cost | None:
    """Return the measured cost, or None. With one kind of link, a flat route has the name of that link."""
    pattern = "all_to_all" if collective == "reduce_scatter" and hop != "flat" else collective
    names = [f"{pattern} {level}" for level in (hop, "in-node", "across")]
    names = [f"{name} plain" for name in names] + names if is_plain else names
    return next((hardware.measured[name] for name in names if name in hardware.measured), None)


def _measure_steps(session: Session) -> CheckResult:
    settings, world = session.settings, session.world
    source = settings.model or _model_for(session)
    context = None if source.startswith(HUGGING_FACE) else settings.sequence
    config = ModelConfig(source, context=context)
    trainers = [_Trainer(session, build_sharded(config, 0, world.mesh)) for _ in range(2)]
    send_nothing(trainers[1].model)
    strategies, compute = [TimedStrategy(each) for each in _strategies(settings)], TimedStrategy(COMPUTE)
    for number in range(settings.rounds):
        in_turn = strategies if number % 2 == 0 else strategies[::-1]  # a drift affects all alike
        for timed in in_turn:
            trainers[0].turn(timed)
        trainers[1].turn(compute)
    for timed in (*strategies, compute):
        timed.seconds = world.max(*timed.seconds)
    session.steps = _step_times(strategies, compute, session)
    session.advice = advise(session.steps)
    numel = parameters(parameter_count(trainers[0].model))
    return CheckResult(
        "ok",
        f"{source}, {numel} parameters, {settings.micro_batches} x {settings.micro_batch} x "
        f"{settings.sequence} tokens per rank and step; {settings.rounds} turns of {len(session.steps)} "
        "strategies",
    )


def _strategies(settings: DoctorSettings) -> list[Strategy]:
    """Return plain FSDP2, with several micro-batches also its gradient accumulation, and every preset."""
    plain = PLAIN_NAMES if settings.micro_batches > 1 else PLAIN_NAMES[:1]
    return [
        *(find_compared(name) for name in plain),
        *(Strategy(name, name, config, sync="across") for name, config in settings.presets().items()),
    ]


def _model_for(session: Session) -> str:
    """Return the largest model of which two fit on this device, which is the same on all ranks."""
    if session.world.device.type == "cpu":
        return "tiny"
    memory = torch.cuda.get_device_properties(session.world.device).total_memory
    for name in MODELS:
        numel = parameter_count(build_model(ModelConfig(name), 0, device="meta"))
        if numel * STATE_BYTES / session.world.size < MEMORY_SHARE * memory:
            return name
    return MODELS[-1]


class _Trainer:
    """A model with an optimizer and one batch."""

    def __init__(self, session: Session, model: nn.Module) -> None:
        settings, world = session.settings, session.world
        check_fits(model, sequence=settings.sequence, vocab_size=1)
        self.model = model
        # foreach is the default on a GPU. The default on a CPU is a slower loop over DTensors.
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=True)
        self._micro_batches = settings.micro_batches
        self._timer = Timer(world.device, repeats=1)
        shape = (settings.micro_batch, settings.sequence + 1)
        tokens = torch.randint(shape_of(model).vocab_size, shape, generator=torch.Generator().manual_seed(0))
        self._tokens = tokens.to(world.device)

    def turn(self, timed: TimedStrategy) -> None:
        """Train some steps with one strategy, and restore plain FSDP2."""
        zpp = None if timed.strategy.config is None else apply(self.model, timed.strategy.config)
        set_sync = timed.strategy.sync_switch(self.model, zpp)
        for _ in range(WARM_UP):
            self._step(set_sync)
        before = Ledger() if zpp is None else zpp.ledger.copy()
        for _ in range(STEPS):
            dist.barrier()
            timed.seconds.append(self._timer.timed(lambda: self._step(set_sync)))
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


def _step_times(strategies: list[TimedStrategy], compute: TimedStrategy, session: Session) -> list[StepTime]:
    """Return the step times of plain FSDP2, of the presets, and of compute without communication."""
    plain, (*_, as_off) = strategies[0], (timed for timed in strategies if timed.strategy.config is None)
    # FSDP2 has no ledger. Config.off() sends the same bytes, and counts them.
    as_off.ledger = next(timed.ledger for timed in strategies if timed.name == "Config.off()")
    ranks_per_node = session.world.size // len(session.topology.nodes)
    times = [
        StepTime(
            timed.name,
            timed.milliseconds,
            timed.speedup(plain),
            timed.across_bytes(ranks_per_node),
            timed.hidden(compute, session.hardware),
        )
        for timed in strategies
    ]
    return [*times, StepTime(COMPUTE.title, compute.milliseconds, compute.speedup(plain), 0.0, None)]


def advise(steps: Sequence[StepTime]) -> list[str]:
    """Return a sentence that recommends a preset or plain FSDP2, with the speedup and its reason.

    Config.off() is plain FSDP2 bit for bit, so the difference of their times is noise. Smaller differences
    count as none."""
    by_name = {step.name: step for step in steps}
    *_, repeated = plain_ones = [step for step in steps if step.name in PLAIN_TITLES]
    plain = max(plain_ones, key=lambda step: step.speedup)
    noise = abs(by_name["Config.off()"].speedup / repeated.speedup - 1)
    margin = 1 + max(SAME, noise)
    fastest = max(by_name[name].speedup for name in ADVISED)
    best = next(by_name[name] for name in ADVISED if by_name[name].speedup * margin >= fastest)
    waits = max(0.0, 1 - by_name[COMPUTE.title].milliseconds / plain.milliseconds)
    why = f"{waits:.0%} of plain FSDP2's step is not compute"
    ratio = f"{best.speedup / plain.speedup:.2f}x as fast as plain FSDP2"
    times = f"median steps {best.milliseconds:,.0f} ms and {plain.milliseconds:,.0f} ms"
    spread = f"two measurements of plain FSDP2 differ by {noise:.0%}"
    if best.speedup < margin * plain.speedup:
        return [f"Use plain FSDP2: zeropp.{best.name} is {ratio} ({times}); {why}; {spread}."]
    if best.across_bytes is not None and plain.across_bytes:
        why += f", and zeropp sends {best.across_bytes / plain.across_bytes:.0%} of its cross-node bytes"
    return [f"Use zeropp.{best.name}, {ratio} ({times}); {why}; {spread}."]
