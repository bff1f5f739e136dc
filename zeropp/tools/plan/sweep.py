"""A sweep: throughput against link rate and number of nodes, for several strategies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..strategies import Strategy
from .hardware import Hardware
from .timeline import simulate
from .trace import Trace

EXPECTED = "ranges such as link=10..800,nodes=2..48, or values such as link=100/400"


@dataclass(frozen=True)
class Axes:
    """What to vary. None: as it is.

    >>> Axes.parse("link=100..800,nodes=2/24")
    Axes(link_gbit_s=(100, 200, 400, 800), nodes=(2, 24))
    """

    link_gbit_s: tuple[int, ...] | None = None
    nodes: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> Axes:
        values: dict[str, tuple[int, ...]] = {}
        for part in text.split(","):
            name, _, given = part.partition("=")
            if name.strip() not in ("link", "nodes") or name.strip() in values:
                raise ValueError(f"sweep is {text!r}, with {part!r} in it; expected {EXPECTED}")
            values[name.strip()] = _numbers(given, text)
        return cls(values.get("link"), values.get("nodes"))


@dataclass(frozen=True)
class Point:
    """One strategy on one cluster."""

    strategy: str
    """Its name."""
    title: str
    nodes: int
    link_gbit_s: float
    step_seconds: float
    tokens_per_second: float
    """Tokens that all ranks together train on in a second."""
    tflops: float
    """Rate of one rank over the whole step, recomputation included."""


def sweep(
    axes: Axes,
    strategies: Sequence[Strategy],
    hardware: Hardware,
    nodes: int,
    trace_of: Callable[[Strategy, int], Trace],
) -> list[Point]:
    """Every combination. `trace_of` dry-runs a strategy on a number of nodes; links need no new one."""
    points = []
    for count in axes.nodes or (nodes,):
        for strategy in strategies:
            trace = trace_of(strategy, count)
            for rate in axes.link_gbit_s or (hardware.known("link_gbit_s"),):
                timeline = simulate(trace, hardware.changed(link_gbit_s=float(rate)))
                points.append(
                    Point(
                        strategy.name,
                        strategy.title,
                        count,
                        float(rate),
                        timeline.step_seconds,
                        timeline.tokens_per_second,
                        timeline.tflops,
                    )
                )
    return points


def _numbers(given: str, text: str) -> tuple[int, ...]:
    """A value, several, or a range: its ends and what doubling finds between them.

    >>> _numbers("10..70", "")
    (10, 20, 40, 70)
    """
    try:
        ends = [int(end) for end in given.split("..")] if ".." in given else []
        found = [int(value) for value in given.split("/")] if not ends else [ends[0]]
        if min(found) < 1 or len(ends) > 2 or sorted(set(found)) != found:
            raise ValueError
        if ends and ends[1] < ends[0]:
            raise ValueError
        while ends and found[-1] < ends[1]:
            found.append(min(2 * found[-1], ends[1]))
    except ValueError:
        raise ValueError(f"sweep is {text!r}, with {given!r} in it; expected {EXPECTED}") from None
    return tuple(found)
