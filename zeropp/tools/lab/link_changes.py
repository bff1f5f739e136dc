"""Scheduled changes of links: `5s node1 down`, `7s node1 up`, `10s all link=100mbit loss=1%`."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .cluster import Cluster, Link
from .link_properties import parse_delay_us

PROPERTIES = ("link", "delay", "loss")
EXPECTED = (
    "a time, a node or 'all', and an action, such as '5s node1 down', '7s node1 up' or "
    "'10s all link=100mbit delay=5ms loss=1%'"
)


@dataclass(frozen=True)
class Change:
    """A change of one link or of all links.

    >>> Change.parse("7s node1 link=100mbit")
    Change(at_seconds=7.0, node=1, state=None, properties={'link': '100mbit'})
    """

    at_seconds: float
    node: int | None
    """None: all nodes."""
    state: str | None
    """"up", "down", or None for a change of properties."""
    properties: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Change:
        words = text.split()
        where = re.fullmatch(r"all|node(\d+)", words[1]) if len(words) >= 3 else None
        try:
            if where is None:
                raise ValueError("it has no time, node or action")
            at_seconds = parse_delay_us(words[0], most_us=10**12) / 1e6
            node = None if where[1] is None else int(where[1])
            if words[2:] in (["up"], ["down"]):
                return cls(at_seconds, node, words[2])
            properties = dict(word.split("=", 1) for word in words[2:] if "=" in word)
            if len(properties) != len(words) - 2 or not set(properties) <= set(PROPERTIES):
                raise ValueError(f"{' '.join(words[2:])!r} is not up, down, or link=, delay=, loss=")
            Link(**properties).request()
        except ValueError as error:
            raise ValueError(f"change of a link is {text!r} ({error}); expected {EXPECTED}") from None
        return cls(at_seconds, node, None, properties)

    def apply(self, cluster: Cluster) -> None:
        if self.state is None:
            cluster.set_link(self.node, **self.properties)
            return
        for node in range(cluster.nodes) if self.node is None else [self.node]:
            (cluster.link_up if self.state == "up" else cluster.link_down)(node)

    def __str__(self) -> str:
        what = self.state or " ".join(f"{name}={value}" for name, value in self.properties.items())
        return f"{'all links' if self.node is None else f'link of node {self.node}'}: {what}"


class Schedule:
    """Applies changes to a cluster in a separate thread, each at its time after `start`.

    `on_change` is called after each change. The first error ends the schedule, and `stop` raises it.
    """

    def __init__(
        self, cluster: Cluster, changes: Sequence[Change], on_change: Callable[[Change], None]
    ) -> None:
        for change in changes:
            if change.node is not None and change.node >= cluster.nodes:
                raise ValueError(
                    f"a change is for node {change.node}; expected a node from 0 to {cluster.nodes - 1}"
                )
        self._cluster = cluster
        self._changes = sorted(changes, key=lambda change: change.at_seconds)
        self._on_change = on_change
        self._stopped = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        started = time.monotonic()
        for change in self._changes:
            if self._stopped.wait(max(0.0, started + change.at_seconds - time.monotonic())):
                return
            try:
                change.apply(self._cluster)
            except Exception as error:
                self._error = error
                return
            self._on_change(change)
