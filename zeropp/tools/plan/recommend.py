"""Recommendation of a strategy: the fastest one that fits in memory, the reason, and what would change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..._text import size
from ..strategies import DEFAULT, STRATEGIES, Strategy
from .hardware import Hardware
from .memory_estimate import MemoryEstimate
from .snippet import snippet
from .timeline import Kind, Timeline, simulate
from .trace import Trace

PLAIN = "fsdp2"
PLAIN_NAMES = (PLAIN, "fsdp2-accumulate")
SAME_SPEED = 1.01
"""Ratio of step times up to which two strategies count as equally fast."""
GIB = 2**30

COMPARED: tuple[Strategy, ...] = (
    Strategy(PLAIN, "FSDP2 as it comes"),
    Strategy("fsdp2-accumulate", "FSDP2, set_requires_gradient_sync", sync="gradients"),
    Strategy("fsdp2-reshard", "FSDP2, reshard_after_forward=int", reshard_in_node=True),
    *(
        strategy
        for strategy in STRATEGIES
        if strategy.name in ("hsdp", "hfsdp", "qwz", "hpz", "qgz", "paper", DEFAULT, "four-bit")
    ),
)
"""Strategies that a plan compares. FSDP2 sends the compute dtype, which usually has 16 bits, so there is no
separate strategy with a 16-bit wire."""


def sensible_strategies(nodes: int, ranks_per_node: int, micro_batches: int) -> list[Strategy]:
    """Return the strategies of `COMPARED` that make sense.

    Accumulation needs several micro-batches. HSDP and resharding inside the node need several nodes.
    """
    return [
        strategy
        for strategy in COMPARED
        if strategy.why_not(nodes, ranks_per_node) is None
        and not (strategy.name == "fsdp2-accumulate" and micro_batches == 1)
        and not (nodes == 1 and (strategy.is_hsdp or strategy.reshard_in_node))
    ]


def find_compared(name: str) -> Strategy:
    """Return the strategy of `COMPARED` with this name.

    >>> find_compared("fsdp2").title
    'FSDP2 as it comes'
    """
    known = {strategy.name: strategy for strategy in COMPARED}
    if name not in known:
        raise ValueError(f"strategy is {name!r}; expected one of {', '.join(known)}")
    return known[name]


@dataclass(frozen=True)
class PlannedStrategy:
    """One strategy with its predicted time and memory."""

    strategy: Strategy
    timeline: Timeline
    memory: MemoryEstimate
    fits: bool

    @property
    def step_seconds(self) -> float:
        return self.timeline.step_seconds

    @property
    def peak_gib(self) -> float:
        return self.memory.peak / GIB

    @property
    def sent_bytes(self) -> float:
        """Bytes that a node sends to others in one step."""
        trace = self.timeline.trace
        return trace.ranks_per_node * sum(hop.across_bytes for hop in trace.hops())


def rank(traces: Mapping[Strategy, Trace], hardware: Hardware) -> list[PlannedStrategy]:
    """Simulate every strategy on `hardware`. Return the fastest first and those that do not fit last."""
    planned = [
        PlannedStrategy(
            strategy, simulate(trace, hardware), hardware.memory_of(trace), fits=hardware.has_room_for(trace)
        )
        for strategy, trace in traces.items()
    ]
    return sorted(planned, key=lambda one: (not one.fits, one.step_seconds))


def recommend(
    ranked: Sequence[PlannedStrategy],
    hardware: Hardware,
    larger_batch: Callable[[Strategy, int], Trace] | None = None,
) -> tuple[str, ...]:
    """Return the advice as sentences.

    Args:
        ranked: the result of `rank` on `hardware`, with plain FSDP2 in it.
        hardware: the cluster.
        larger_batch: dry-runs a strategy with a multiple of the micro-batch; None: no advice on that.
    """
    best = ranked[0]
    if not best.fits:
        return _does_not_fit(ranked, hardware)
    plain = min(
        (one for one in ranked if one.strategy.name in PLAIN_NAMES),
        key=lambda one: (not one.fits, one.step_seconds),
    )
    if plain.fits and plain.step_seconds <= SAME_SPEED * best.step_seconds:
        sentences = [_zeropp_does_not_help(plain, best)]
        ours = _best_of_ours(ranked)
        slower = slowest_link_as_fast(plain.timeline.trace, ours.timeline.trace, hardware)
        if slower is not None and hardware.link_gbit_s is not None and slower < hardware.link_gbit_s:
            sentences.append(f"With links below {slower:,.3g} Gbit/s, {ours.strategy.title} would be faster.")
        return (*sentences, *_code(plain.strategy, hardware))
    sentences = [_why(best, plain, hardware), *_what_would_change(best, plain, hardware)]
    if larger_batch is not None:
        sentences += _larger_batches(best.strategy, plain.strategy, hardware, larger_batch)
    return (*sentences, *_do_not_fit(ranked, hardware), *_code(best.strategy, hardware))


def slowest_link_as_fast(plain: Trace, other: Trace, hardware: Hardware) -> float | None:
    """Return the lowest link rate in Gbit/s at which `plain` is as fast as `other`, or None if there is none.

    Bisection finds it: the faster the link, the less the bytes of `plain` matter.
    """

    def as_fast(link_gbit_s: float) -> bool:
        machine = hardware.changed(link_gbit_s=link_gbit_s)
        return simulate(plain, machine).step_seconds <= SAME_SPEED * simulate(other, machine).step_seconds

    slow, fast = 0.01, 1e5
    if as_fast(slow):
        return slow
    if not as_fast(fast):
        return None
    while fast / slow > 1.005:
        middle = (slow * fast) ** 0.5
        slow, fast = (slow, middle) if as_fast(middle) else (middle, fast)
    return fast


def _why(best: PlannedStrategy, plain: PlannedStrategy, hardware: Hardware) -> str:
    waits = plain.timeline.critical_seconds
    shares = ", ".join(
        f"{seconds / plain.step_seconds:.0%} {_WAITS_FOR[kind]}"
        for kind, seconds in sorted(waits.items(), key=lambda item: -item[1])
        if seconds > 0.01 * plain.step_seconds
    )
    fits = "" if plain.fits else f" (which does not fit: {plain.peak_gib:.1f} GiB)"
    speedup = plain.step_seconds / best.step_seconds
    rate = "" if hardware.link_gbit_s is None else f", at {hardware.link_gbit_s:,.3g} Gbit/s"
    return (
        f"Use {best.strategy.title}: {best.step_seconds * 1e3:,.0f} ms per step, {speedup:.2f}x as fast as "
        f"{plain.strategy.title}{fits}. The step of {plain.strategy.title} is {shares}. Each node sends "
        f"{size(best.sent_bytes)} per step instead of {size(plain.sent_bytes)}{rate}."
    )


_WAITS_FOR: dict[Kind, str] = {
    "compute": "compute",
    "codec": "encoding and decoding",
    "in-node link": "waiting for links inside the node",
    "across link": "waiting for the link across nodes",
}


def _what_would_change(best: PlannedStrategy, plain: PlannedStrategy, hardware: Hardware) -> list[str]:
    rate = slowest_link_as_fast(plain.timeline.trace, best.timeline.trace, hardware)
    if rate is None:
        return [f"{plain.strategy.title} is slower at any link speed, because of its in-node traffic."]
    return [f"Above {rate:,.3g} Gbit/s {plain.strategy.title} is as fast."]


def _larger_batches(
    best: Strategy, plain: Strategy, hardware: Hardware, larger_batch: Callable[[Strategy, int], Trace]
) -> list[str]:
    for times in (2, 4, 8, 16):
        traces = [larger_batch(strategy, times) for strategy in (plain, best)]
        if not all(map(hardware.has_room_for, traces)):
            return [f"{times} times the micro-batch does not fit. Below that, the answer is the same."]
        first, second = (simulate(trace, hardware).step_seconds for trace in traces)
        if first <= SAME_SPEED * second:
            return [f"With {times} times the micro-batch {plain.title} is as fast."]
    return [f"Up to 16 times the micro-batch {best.title} stays faster."]


def _zeropp_does_not_help(plain: PlannedStrategy, best: PlannedStrategy) -> str:
    hidden = plain.timeline.critical_seconds["compute"] / plain.step_seconds
    fastest = "Nothing is faster" if plain is best else f"{best.strategy.title} gains less than 1%"
    return (
        f"ZeRO++ does not help here: use {plain.strategy.title}, {plain.step_seconds * 1e3:,.0f} ms per "
        f"step. {fastest}. {hidden:.0%} of the step is compute, which hides FSDP2's communication."
    )


def _best_of_ours(ranked: Sequence[PlannedStrategy]) -> PlannedStrategy:
    ours = [one for one in ranked if one.strategy.name not in PLAIN_NAMES]
    return min(ours or ranked, key=lambda one: (not one.fits, one.step_seconds))


def _code(strategy: Strategy, hardware: Hardware) -> list[str]:
    sentences = [f"In your script: {snippet(strategy)}."]
    if not hardware.codecs and strategy.config is not None:
        sentences.append(
            f"Codec speeds on {hardware.name} are estimates from the rate of its memory: zeropp's kernels "
            "were never measured on a GPU."
        )
    return sentences


def _does_not_fit(ranked: Sequence[PlannedStrategy], hardware: Hardware) -> tuple[str, ...]:
    smallest = min(ranked, key=lambda one: one.peak_gib)
    return (
        f"Nothing fits: the smallest strategy, {smallest.strategy.title}, needs {smallest.peak_gib:.1f} GiB "
        f"per rank, and a rank has {hardware.memory_gib:.1f} GiB. Use more nodes, a smaller micro-batch, or "
        "activation checkpointing.",
    )


def _do_not_fit(ranked: Sequence[PlannedStrategy], hardware: Hardware) -> list[str]:
    return [
        f"{one.strategy.title} does not fit: it needs {one.peak_gib:.1f} GiB per rank, and a rank has "
        f"{hardware.memory_gib:g} GiB."
        for one in ranked
        if not one.fits
    ]
