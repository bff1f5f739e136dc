"""Which way to train: the fastest that fits in memory, why, and what would change the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..strategies import DEFAULT, STRATEGIES, Strategy
from .hardware import Hardware
from .timeline import Kind, Timeline, simulate
from .trace import Trace

PLAIN = "fsdp2"
PLAIN_ROWS = ("fsdp2", "fsdp2-accumulate")
AS_FAST = 1.01
"""Steps whose times differ by less are as fast as each other."""
GIB = 2**30

CANDIDATES: tuple[Strategy, ...] = (
    Strategy(PLAIN, "FSDP2 as it comes"),
    Strategy("fsdp2-accumulate", "FSDP2, set_requires_gradient_sync", sync="gradients"),
    Strategy("fsdp2-reshard", "FSDP2, reshard_after_forward=int", reshard_in_node=True),
    *(row for row in STRATEGIES if row.name in ("hsdp", "qwz", "hpz", "qgz", "paper", DEFAULT, "four-bit")),
)
"""What a user could run. FSDP2 sends what it computes with, 16 bits as a rule: no row has a 16-bit wire."""


def candidates(nodes: int, ranks_per_node: int, micro_batches: int) -> list[Strategy]:
    """Those that make sense: one micro-batch leaves nothing to put off, one node nothing to cross."""
    return [
        row
        for row in CANDIDATES
        if row.why_not(nodes, ranks_per_node) is None
        and not (row.name == "fsdp2-accumulate" and micro_batches == 1)
        and not (nodes == 1 and (row.is_hsdp or row.reshard_in_node))
    ]


@dataclass(frozen=True)
class Option:
    """One way to train, with what it would cost."""

    row: Strategy
    timeline: Timeline
    fits: bool

    @property
    def step_seconds(self) -> float:
        return self.timeline.step_seconds

    @property
    def peak_gib(self) -> float:
        return self.timeline.trace.memory.peak / GIB

    @property
    def sent_gb(self) -> float:
        """By a node, in one step, to other nodes."""
        trace = self.timeline.trace
        return trace.ranks_per_node * sum(hop.across_bytes for hop in trace.hops()) / 1e9


@dataclass(frozen=True)
class Recommendation:
    options: tuple[Option, ...]
    """Fastest first; those that do not fit come last."""
    sentences: tuple[str, ...]
    """The advice, in words."""

    @property
    def best(self) -> Option | None:
        return self.options[0] if self.options[0].fits else None

    def option(self, name: str) -> Option | None:
        return next((option for option in self.options if option.row.name == name), None)


def recommend(
    traces: Mapping[Strategy, Trace],
    hardware: Hardware,
    larger_batch: Callable[[Strategy, int], Trace] | None = None,
) -> Recommendation:
    """Compare ways to train on `hardware`.

    Args:
        traces: the dry run of each way; plain FSDP2 must be among them.
        larger_batch: the dry run of a way with so many times the micro-batch; None: not asked.
    """
    options = rank(traces, hardware)
    best = options[0]
    if not best.fits:
        return Recommendation(tuple(options), _does_not_fit(options, hardware))
    plain = min(
        (option for option in options if option.row.name in PLAIN_ROWS),
        key=lambda option: (not option.fits, option.step_seconds),
    )
    if plain.fits and plain.step_seconds <= AS_FAST * best.step_seconds:
        sentences = [_zeropp_does_not_help(plain, best)]
        slower = slowest_link_as_fast(plain.timeline.trace, _best_of_ours(options).timeline.trace, hardware)
        if slower is not None and slower < hardware.link_gbit_s:
            sentences.append(
                f"With links below {slower:,.3g} Gbit/s, {_best_of_ours(options).row.title} would be faster."
            )
        return Recommendation(tuple(options), tuple(sentences))
    sentences = [_why(best, plain, hardware), *_what_would_change(best, plain, hardware)]
    if larger_batch is not None:
        sentences += _larger_batches(best.row, plain.row, hardware, larger_batch)
    sentences += _do_not_fit(options, hardware)
    return Recommendation(tuple(options), tuple(sentences))


def rank(traces: Mapping[Strategy, Trace], hardware: Hardware) -> list[Option]:
    """All ways to train, fastest first; those that do not fit come last."""
    options = [
        Option(row, simulate(trace, hardware), trace.memory.peak <= hardware.memory_gib * GIB)
        for row, trace in traces.items()
    ]
    return sorted(options, key=lambda option: (not option.fits, option.step_seconds))


def slowest_link_as_fast(plain: Trace, other: Trace, hardware: Hardware) -> float | None:
    """The link rate in Gbit/s from which on `plain` is as fast as `other`; None if it is at no rate.

    Found by bisection: on fast links the way with less to do besides sending wins.
    """

    def as_fast(link_gbit_s: float) -> bool:
        machine = hardware.changed(link_gbit_s=link_gbit_s)
        return simulate(plain, machine).step_seconds <= AS_FAST * simulate(other, machine).step_seconds

    slow, fast = 0.01, 1e5
    if as_fast(slow):
        return slow
    if not as_fast(fast):
        return None
    while fast / slow > 1.005:
        middle = (slow * fast) ** 0.5
        slow, fast = (slow, middle) if as_fast(middle) else (middle, fast)
    return fast


def _why(best: Option, plain: Option, hardware: Hardware) -> str:
    waits = plain.timeline.critical_seconds
    shares = ", ".join(
        f"{seconds / plain.step_seconds:.0%} {_WAITS_FOR[kind]}"
        for kind, seconds in sorted(waits.items(), key=lambda item: -item[1])
        if seconds > 0.01 * plain.step_seconds
    )
    fits = "" if plain.fits else f" (which does not fit: {plain.peak_gib:.1f} GiB)"
    speedup = plain.step_seconds / best.step_seconds
    return (
        f"Use {best.row.title}: {best.step_seconds * 1e3:,.0f} ms a step, {speedup:.2f}x as fast as "
        f"{plain.row.title}{fits}. That one's step is {shares}; it sends {plain.sent_gb:,.1f} GB out of each "
        f"node, this one {best.sent_gb:,.1f} GB, at {hardware.link_gbit_s:,.3g} Gbit/s."
    )


_WAITS_FOR: dict[Kind, str] = {
    "compute": "compute",
    "codec": "encoding and decoding",
    "in-node link": "waiting for links inside the node",
    "across link": "waiting for the link across nodes",
}


def _what_would_change(best: Option, plain: Option, hardware: Hardware) -> list[str]:
    rate = slowest_link_as_fast(plain.timeline.trace, best.timeline.trace, hardware)
    if rate is None:
        return [f"On no link is {plain.row.title} as fast: what it sends inside the node decides, too."]
    return [f"Above {rate:,.3g} Gbit/s {plain.row.title} is as fast."]


def _larger_batches(
    best: Strategy, plain: Strategy, hardware: Hardware, larger_batch: Callable[[Strategy, int], Trace]
) -> list[str]:
    for times in (2, 4, 8, 16):
        traces = [larger_batch(row, times) for row in (plain, best)]
        if any(trace.memory.peak > hardware.memory_gib * GIB for trace in traces):
            return [f"{times} times the micro-batch does not fit; up to there the answer is the same."]
        first, second = (simulate(trace, hardware).step_seconds for trace in traces)
        if first <= AS_FAST * second:
            return [f"With {times} times the micro-batch {plain.title} is as fast."]
    return [f"Up to 16 times the micro-batch {best.title} stays faster."]


def _zeropp_does_not_help(plain: Option, best: Option) -> str:
    hidden = plain.timeline.critical_seconds["compute"] / plain.step_seconds
    fastest = "nothing is faster" if plain is best else f"{best.row.title} gains less than 1%"
    return (
        f"ZeRO++ does not help here: use {plain.row.title}, {plain.step_seconds * 1e3:,.0f} ms a step; "
        f"{fastest}. {hidden:.0%} of its step is compute, behind which FSDP2 hides what it sends."
    )


def _best_of_ours(options: Sequence[Option]) -> Option:
    ours = [option for option in options if option.row.name not in PLAIN_ROWS]
    return min(ours or options, key=lambda option: (not option.fits, option.step_seconds))


def _does_not_fit(options: Sequence[Option], hardware: Hardware) -> tuple[str, ...]:
    smallest = min(options, key=lambda option: option.peak_gib)
    return (
        f"Nothing fits: the smallest, {smallest.row.title}, needs {smallest.peak_gib:.1f} GiB on a rank with "
        f"{hardware.memory_gib:.1f}. Use more nodes, a smaller micro-batch, or activation checkpointing.",
    )


def _do_not_fit(options: Sequence[Option], hardware: Hardware) -> list[str]:
    return [
        f"{option.row.title} does not fit: {option.peak_gib:.1f} GiB, on a rank with {hardware.memory_gib:g}."
        for option in options
        if not option.fits
    ]
