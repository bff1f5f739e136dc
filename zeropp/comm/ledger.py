"""The ledger: bytes that this rank sent, per unit, collective and hop, and the work of its codecs. Always on:
one dict update per hop, and one per codec operation.

Bytes are those of the algorithm, without packet headers. An all-gather over m ranks is a ring: each rank
sends m - 1 pieces, all of them to its successor. An all-to-all sends one piece to every other rank. NCCL may
choose another algorithm: totals stay the same, but the share of a link may differ. Bytes of a flat ring that
leave a node are divided evenly among the node's ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from threading import Lock
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from .._text import count
from ..quant.codec import Operation
from .profiler_labels import Collective


@dataclass
class Traffic:
    """Calls and bytes sent by this rank."""

    calls: int = 0
    wire_bytes: int = 0
    across_bytes: int = 0
    """Part of `wire_bytes` that left this rank's node."""

    def add(self, other: Traffic) -> None:
        self.calls += other.calls
        self.wire_bytes += other.wire_bytes
        self.across_bytes += other.across_bytes


class Key(NamedTuple):
    """Key of a counter of traffic."""

    unit: str
    collective: Collective
    hop: str


NODE_SHARD = "node shard"
KEPT_ERRORS = "kept errors"
"""Names in place of a hop, for work on bytes that a rank stores and does not send."""


class WorkKey(NamedTuple):
    """Key of a counter of codec work."""

    unit: str
    collective: Collective
    hop: str
    operation: Operation
    codec: str
    """Name of the codec in `Config`."""

    @property
    def encodes(self) -> bool:
        """Whether the operation wrote encoded elements. False: it read them."""
        return self.operation in ("encode", "recode_to")


@dataclass
class CodecWork:
    """Calls of a codec, and elements that they read (decode) or wrote (encode)."""

    calls: int = 0
    elements: int = 0


class Ledger:
    """Counters per (unit, collective, hop), and the same counters for 16-bit FSDP2 as a baseline.

    Examples:
        >>> ledger = Ledger()
        >>> ledger.record("layers.0", "all_gather", "across", wire_bytes=100, across_bytes=100)
        >>> ledger.record_baseline("layers.0", "all_gather", wire_bytes=600, across_bytes=600)
        >>> ledger.total(hop="across").wire_bytes, ledger.baseline_total().wire_bytes
        (100, 600)
    """

    def __init__(self) -> None:
        self._sent: dict[Key, Traffic] = {}
        self._baseline: dict[Key, Traffic] = {}
        self._work: dict[WorkKey, CodecWork] = {}
        self.left_alone: dict[str, int] = {}
        """Parameters of each unit that FSDP2 sends itself. These units are not counted."""
        self._lock = Lock()  # on a CPU, gathers and reductions run in separate threads

    def record(
        self, unit: str, collective: Collective, hop: str, *, wire_bytes: int, across_bytes: int
    ) -> None:
        """Count one call of a collective on a hop."""
        with self._lock:
            _count(self._sent, Key(unit, collective, hop), wire_bytes, across_bytes)

    def record_baseline(
        self, unit: str, collective: Collective, *, wire_bytes: int, across_bytes: int
    ) -> None:
        """Count the bytes that 16-bit FSDP2 would have sent for the present call."""
        with self._lock:
            _count(self._baseline, Key(unit, collective, "fsdp2-16bit"), wire_bytes, across_bytes)

    def record_work(self, key: WorkKey, elements: int) -> None:
        """Count one call of a codec."""
        with self._lock:
            work = self._work.get(key)
            if work is None:
                work = self._work[key] = CodecWork()
            work.calls += 1
            work.elements += elements

    def rows(self) -> Iterator[tuple[Key, Traffic]]:
        """Return every counter of traffic, in order of first use."""
        yield from self._sent.items()

    def work(self) -> Iterator[tuple[WorkKey, CodecWork]]:
        """Return every counter of codec work, in order of first use."""
        yield from self._work.items()

    def total(
        self, *, unit: str | None = None, collective: Collective | None = None, hop: str | None = None
    ) -> Traffic:
        """Return the sum over all counters that match."""
        return _sum(self._sent, unit, collective, hop)

    def baseline_total(self, *, unit: str | None = None, collective: Collective | None = None) -> Traffic:
        """Return the sum of bytes that 16-bit FSDP2 would have sent for the same calls."""
        return _sum(self._baseline, unit, collective, None)

    def copy(self) -> Ledger:
        """Return a snapshot of all counters."""
        return self.since(Ledger())

    def since(self, before: Ledger) -> Ledger:
        """Return the difference to `before`, an earlier copy of this ledger: only counters that changed.

        Examples:
            >>> ledger = Ledger()
            >>> ledger.record("layers.0", "all_gather", "across", wire_bytes=100, across_bytes=100)
            >>> before = ledger.copy()
            >>> ledger.record("layers.1", "all_gather", "across", wire_bytes=70, across_bytes=70)
            >>> [(key.unit, traffic.wire_bytes) for key, traffic in ledger.since(before).rows()]
            [('layers.1', 70)]
        """
        later = Ledger()
        for mine, theirs, into in (
            (self._sent, before._sent, later._sent),
            (self._baseline, before._baseline, later._baseline),
        ):
            for key, traffic in mine.items():
                known = theirs.get(key, Traffic())
                if traffic.calls != known.calls:
                    into[key] = Traffic(
                        traffic.calls - known.calls,
                        traffic.wire_bytes - known.wire_bytes,
                        traffic.across_bytes - known.across_bytes,
                    )
        for work_key, work in self._work.items():
            done = before._work.get(work_key, CodecWork())
            if work.calls != done.calls:
                later._work[work_key] = CodecWork(work.calls - done.calls, work.elements - done.elements)
        return later

    def reset(self) -> None:
        """Set all counters to zero, for instance after a warm-up step."""
        self._sent.clear()
        self._baseline.clear()
        self._work.clear()

    @property
    def title(self) -> str:
        """Title of the table. Names the units that are not counted.

        Examples:
            >>> ledger = Ledger()
            >>> ledger.left_alone = {"layers.0.experts": 1_000_000}
            >>> ledger.title
            'sent by this rank, without 1 unit of 1,000,000 parameters that FSDP2 sends itself'
        """
        if not self.left_alone:
            return "sent by this rank"
        units = count(len(self.left_alone), "unit")
        parameters = sum(self.left_alone.values())
        return f"sent by this rank, without {units} of {parameters:,} parameters that FSDP2 sends itself"

    def table(self) -> str:
        """Return calls and bytes per collective and hop, next to those of 16-bit FSDP2, as text."""
        table = Table(title=self.title)
        for column in ("collective", "hop"):
            table.add_column(column)
        for column in ("calls", "wire bytes", "across nodes", "16-bit FSDP2, across", "less by"):
            table.add_column(column, justify="right")
        for collective in dict.fromkeys(key.collective for key in (*self._sent, *self._baseline)):
            for hop in dict.fromkeys(key.hop for key in self._sent if key.collective == collective):
                sent = self.total(collective=collective, hop=hop)
                table.add_row(
                    collective, hop, str(sent.calls), f"{sent.wire_bytes:,}", f"{sent.across_bytes:,}"
                )
            sent, baseline = self.total(collective=collective), self.baseline_total(collective=collective)
            table.add_row(
                collective, "all", f"({baseline.calls})", *_against(sent, baseline), end_section=True
            )
        table.add_row("total", "", "", *_against(self.total(), self.baseline_total()))
        return render(table)


def _count(counters: dict[Key, Traffic], key: Key, wire_bytes: int, across_bytes: int) -> None:
    traffic = counters.get(key)
    if traffic is None:
        traffic = counters[key] = Traffic()
    traffic.calls += 1
    traffic.wire_bytes += wire_bytes
    traffic.across_bytes += across_bytes


def render(table: Table) -> str:
    """Return a rich table as plain text, wide enough not to cut names."""
    console = Console(file=StringIO(), width=160, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def _against(sent: Traffic, baseline: Traffic) -> tuple[str, str, str, str]:
    # No ratio if nothing crossed nodes, as on one node.
    ratio = f"{baseline.across_bytes / sent.across_bytes:.2f}x" if sent.across_bytes else "-"
    return (f"{sent.wire_bytes:,}", f"{sent.across_bytes:,}", f"{baseline.across_bytes:,}", ratio)


def _sum(counters: dict[Key, Traffic], unit: str | None, collective: str | None, hop: str | None) -> Traffic:
    total = Traffic()
    for key, traffic in counters.items():
        if unit in (None, key.unit) and collective in (None, key.collective) and hop in (None, key.hop):
            total.add(traffic)
    return total
