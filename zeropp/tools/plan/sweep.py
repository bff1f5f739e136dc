"""A sweep: throughput of several strategies over link rates and numbers of nodes."""

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
    """Values to sweep over. None: the value of the scenario or of the hardware.

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
            try:
                values[name.strip()] = _numbers(given)
            except ValueError:
                raise ValueError(f"sweep is {text!r}, with {given!r} in it; expected {EXPECTED}") from None
        return cls(values.get("link"), values.get("nodes"))


@dataclass(frozen=True)
class Point:
    """Prediction for one strategy on one cluster."""

    strategy: str
    """Name of the strategy."""
    title: str
    nodes: int
    link_gbit_s: float
    step_seconds: float
    tokens_per_second: float
    """Tokens per second of all ranks."""
    tflops: float
    """TFLOP/s of one rank over the whole step, recomputation included."""


def sweep(
    axes: Axes,
    strategies: Sequence[Strategy],
    hardware: Hardware,
    nodes: int,
    trace_of: Callable[[Strategy, int], Trace],
) -> list[Point]:
    """Predict every combination.

    Args:
        axes: values to sweep over.
        strategies: the strategies to predict.
        hardware: the cluster, apart from the swept values.
        nodes: number of nodes if it is not swept.
        trace_of: dry-runs a strategy on a number of nodes. All link rates share the trace.
    """
    points = []
    for count in axes.nodes or (nodes,):
        for strategy in strategies:
            trace = trace_of(strategy, count)
            for rate in axes.link_gbit_s or (hardware.require("link_gbit_s"),):
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


def _numbers(text: str) -> tuple[int, ...]:
    """Parse one value, several values, or a range. A range has its ends, and doublings between them.

    >>> _numbers("7"), _numbers("10/30"), _numbers("10..70")
    ((7,), (10, 30), (10, 20, 40, 70))
    """
    if ".." in text:
        first, last = (int(end) for end in text.split(".."))
        numbers = [first]
        while 0 < numbers[-1] < last:
            numbers.append(min(2 * numbers[-1], last))
        is_valid = first <= last
    else:
        numbers = [int(value) for value in text.split("/")]
        is_valid = sorted(set(numbers)) == numbers
    if not is_valid or numbers[0] < 1:
        raise ValueError(text)
    return tuple(numbers)
