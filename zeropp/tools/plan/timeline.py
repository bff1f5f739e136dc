"""The timeline: start, end and resource of each operation of a step, from a discrete-event simulation.

An operation starts when the previous operation on its resource and all operations that it depends on have
ended. Resources serve in the order in which the program starts operations, as CUDA streams and NCCL
communicators do. The timeline is therefore the longest path through a fixed graph: a faster link, a faster
codec or less compute never makes a step longer, and nothing has to be searched.

[Note: FSDP2's schedule] (torch/distributed/fsdp/_fully_shard)
- Compute of a unit waits for its gather.
- Forward: the program runs ahead of the device, so gathers follow each other. But the gather after next waits
  until this gather's buffer is copied out, right before compute. Two gathers are in flight.
- Backward: when the weights of a unit have arrived, the gather of the next unit starts (explicit prefetch).
- A reduction starts when the unit's gradients are computed, and compute goes on. Before the next reduction
  starts, compute waits for the previous one. One reduction is in flight.
- HSDP's all-reduce follows the reduction on a separate stream. Only the end of backward waits for it.
- When backward ends, and before the optimizer, everything waits for everything.
Without overlap (see hardware.py), all of this happens in one thread, in order.

[Note: Schedule of communication threads] (cpu/comm_threads.py, cpu/prefetch.py)
On a CPU zeropp has threads instead of streams, one for gathers and one for reductions. Gathers start when
FSDP2's would. The differences are:
- A thread runs two collectives concurrently. While one waits for the wire, it encodes the next one.
- Before the next reduction starts, compute waits until the previous one has encoded its gradients. (A ring
  reads gradients until its end, so compute waits for the end of a ring.)
- When a hop ends, its thread first waits for a core, which compute occupies (`Hardware.core_wait_us`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Literal

from ...comm.execution import pipelined, run_to_end
from ...cpu.comm_threads import MAX_TRANSFERS, Direction
from .hardware import Hardware
from .trace import Compute, Event, Gather, Phase, Reduce, Trace, TracedHop

Kind = Literal["compute", "codec", "in-node link", "across link", "wait"]
KINDS: tuple[Kind, ...] = ("compute", "codec", "in-node link", "across link")
"""Kinds of work that take time."""


@dataclass(frozen=True)
class Op:
    """One operation, on one or two resources."""

    name: str
    kind: Kind
    phase: Phase
    resources: tuple[str, ...]
    start: float
    end: float
    after: int | None
    """Index of the operation whose end decides the start of this one."""
    is_slowdown: bool = False
    """Whether this is time that compute loses to concurrent communication. Another operation, that of the
    communication, has the same work, so sums of work skip this one."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """Operations of one optimizer step, with their times."""

    ops: tuple[Op, ...]
    trace: Trace

    @property
    def step_seconds(self) -> float:
        return max((op.end for op in self.ops), default=0.0)

    @property
    def busy_seconds(self) -> dict[Kind, float]:
        """Seconds of each kind of work, overlapped or not."""
        busy: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        for op in self.ops:
            if op.kind != "wait" and not op.is_slowdown:
                busy[op.kind] += op.seconds
        return busy

    @property
    def critical_seconds(self) -> dict[Kind, float]:
        """Seconds of each kind of work on the longest path. They add up to the step."""
        split: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        index = max(range(len(self.ops)), key=lambda i: self.ops[i].end, default=None)
        while index is not None:
            op = self.ops[index]
            if op.kind != "wait":
                split[op.kind] += op.seconds
            index = op.after
        return split

    @property
    def bottleneck(self) -> Kind:
        """Kind of work with the most time on the longest path."""
        split = self.critical_seconds
        return max(split, key=lambda kind: split[kind])

    def phases(self) -> list[tuple[Phase, float, float]]:
        """Return start and end of each phase of each micro-batch. Recomputation is a part of backward."""
        found: list[tuple[Phase, float, float]] = []
        reached = 0.0
        for op in self.ops:
            if op.end > reached:
                phase: Phase = "backward" if op.phase == "recompute" else op.phase
                if found and found[-1][0] == phase:
                    found[-1] = (phase, found[-1][1], op.end)
                else:
                    found.append((phase, reached, op.end))
                reached = op.end
        return found

    def phase_seconds(self) -> dict[Phase, float]:
        """Return the seconds of each phase, summed over micro-batches."""
        seconds: dict[Phase, float] = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        for phase, start, end in self.phases():
            seconds[phase] += end - start
        return seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks."""
        return self.trace.tokens * self.trace.nodes * self.trace.ranks_per_node / self.step_seconds

    @property
    def tflops(self) -> float:
        """TFLOP/s of one rank over the whole step, recomputation included."""
        return self.trace.flops / self.step_seconds / 1e12


def simulate(trace: Trace, hardware: Hardware) -> Timeline:
    """Simulate the step of `trace` on `hardware`."""
    builder = _TimelineBuilder(trace, hardware)
    for event, phase in _with_phases(trace.events):
        builder.add_event(event, phase)
    return Timeline(tuple(builder.ops), trace)


@dataclass
class _Gathered:
    """The last gather of one unit."""

    end: int
    """Its last operation."""
    is_used: bool = False
    """Whether compute has waited for it."""


@dataclass
class _TimelineBuilder:
    trace: Trace
    hardware: Hardware
    ops: list[Op] = field(default_factory=list)
    _last: dict[str, int] = field(default_factory=dict)
    """Last operation of each resource."""
    _gathered: dict[str, _Gathered] = field(default_factory=dict)
    """Last gather of each unit."""
    _copied_out: list[int] = field(default_factory=list)
    """Operation of compute that has waited for each used gather, and copies its buffer out."""
    _last_gathered: str | None = None
    """Unit of the gather that has started last."""
    _gradients_read: int | None = None
    """Operation after which the full gradients of the last reduction can be freed."""
    _encoded: int | None = None
    """Last operation before the last chunk of the current collective goes on the wire."""
    _started: Counter[Direction] = field(default_factory=Counter)
    """Number of collectives that each communication thread has started."""
    _phase: Phase = "forward"

    def add_event(self, event: Event, phase: Phase) -> None:
        if phase == "optimizer" or (phase == "forward" and self._phase != "forward"):
            self._wait_for_everything(phase)
        self._phase = phase
        if isinstance(event, Gather):
            self._gather(event)
        elif isinstance(event, Reduce):
            self._reduce(event)
        else:
            self._use(event.unit)
            seconds = self.hardware.compute_seconds(event)
            self._add(f"{event.phase} {event.unit}", "compute", ["compute"], seconds)

    def _gather(self, gather: Gather) -> None:
        if self._phase == "forward":
            ready = self._copied_out[-2:-1]  # of the gather before the last one: two are in flight
        else:
            if self._last_gathered is not None:  # the prefetch starts after these weights have arrived
                self._use(self._last_gathered)
            ready = self._copied_out[-1:]
        stream = self._stream("gather")
        self._wait(stream, ready)
        end = self._collective(f"gather {gather.unit}", gather.hops, stream)
        self._gathered[gather.unit] = _Gathered(end)
        self._last_gathered = gather.unit

    def _reduce(self, reduce: Reduce) -> None:
        stream = self._stream("reduce")
        if self._gradients_read is not None:
            self._wait("compute", [self._gradients_read])
        scattered = tuple(hop for hop in reduce.hops if hop.pattern != "all_reduce")
        replicated = tuple(hop for hop in reduce.hops if hop.pattern == "all_reduce")
        self._wait(stream, self._latest("compute"))
        end = self._collective(f"reduce {reduce.unit}", scattered, stream)
        is_ring = all(hop.pattern != "all_to_all" for hop in scattered)
        is_read_early = self.hardware.uses_comm_threads(self.trace) and not is_ring
        self._gradients_read = self._encoded if is_read_early else end
        if replicated:
            stream = "compute" if stream == "compute" else "all-reduce"
            self._wait(stream, [end])
            self._collective(f"reduce {reduce.unit}", replicated, stream)

    def _stream(self, direction: Direction) -> str:
        """Return the resource that the next collective runs on."""
        if not self.hardware.uses_comm_threads(self.trace):
            return direction if self.hardware.overlap else "compute"
        job = self._started[direction] % MAX_TRANSFERS
        self._started[direction] += 1
        return f"{direction} {job + 1}" if job else direction

    def _use(self, unit: str) -> None:
        """Make compute wait for the unit's weights."""
        gathered = self._gathered.get(unit)
        if gathered is not None and not gathered.is_used:
            self._copied_out.append(self._wait("compute", [gathered.end]))
            gathered.is_used = True

    def _collective(self, name: str, hops: tuple[TracedHop, ...], stream: str) -> int:
        """Add all chunks, in the order in which `pipelined` advances them. Return the last operation."""
        count = hops[0].chunks if hops else 0
        run_to_end(
            pipelined(self._chunk(f"{name}, chunk {k + 1}/{count}", hops, stream) for k in range(count))
        )
        return self._wait(stream, [])

    def _chunk(self, name: str, hops: tuple[TracedHop, ...], stream: str) -> Generator[None]:
        for hop in hops:
            encode = self.hardware.encode_seconds(hop.codec, hop.encoded / hop.chunks)
            self._codec(f"encode {name}", encode, stream)
            if hop is hops[0]:
                self._encoded = self._last[stream]
            on_wire = self._hop(f"{hop.level} {name}", hop, self._latest(stream))
            host = self.hardware.host_seconds(hop)
            if host:
                self._add(f"host {name}", "compute", ["compute"], host, is_slowdown=True)
            yield
            self._wait(stream, [on_wire])
            if self.hardware.uses_comm_threads(self.trace) and self.hardware.core_wait_us:
                wait = self.hardware.core_wait_us * 1e-6
                self._add(f"core for {name}", "compute", [stream], wait, is_slowdown=True)
            decode = self.hardware.decode_seconds(hop.codec, hop.decoded / hop.chunks)
            self._codec(f"decode {name}", decode, stream)

    def _codec(self, name: str, seconds: float, stream: str) -> None:
        if not seconds:
            return
        self._add(name, "codec", [stream], seconds)
        if stream != "compute":
            self._add(name, "codec", ["compute"], seconds, is_slowdown=True)

    def _hop(self, name: str, hop: TracedHop, after: Iterable[int]) -> int:
        in_node, across = self.hardware.hop_seconds(hop, self.trace.nodes, self.trace.ranks_per_node)
        links = {"in-node": ["in-node link"], "across": ["across link"]}
        resources = links.get(hop.level, ["in-node link", "across link"])
        kind: Kind = "across link" if across >= in_node else "in-node link"
        return self._add(name, kind, resources, max(in_node, across), after)

    def _wait_for_everything(self, phase: Phase) -> None:
        self._phase = phase
        everything = list(self._last.values())
        done = self._wait("compute", everything)
        for resource in list(self._last):
            if resource != "compute":
                self._wait(resource, [done])
        self._gradients_read, self._last_gathered = None, None
        self._copied_out.clear()

    def _wait(self, resource: str, after: Iterable[int]) -> int:
        return self._add("wait", "wait", [resource], 0.0, after)

    def _latest(self, resource: str) -> list[int]:
        return [self._last[resource]] if resource in self._last else []

    def _add(
        self,
        name: str,
        kind: Kind,
        resources: list[str],
        seconds: float,
        after: Iterable[int] = (),
        is_slowdown: bool = False,
    ) -> int:
        needs = [*after, *(index for resource in resources for index in self._latest(resource))]
        decided = max(needs, key=lambda index: self.ops[index].end, default=None)
        start = 0.0 if decided is None else self.ops[decided].end
        op = Op(name, kind, self._phase, tuple(resources), start, start + seconds, decided, is_slowdown)
        self.ops.append(op)
        index = len(self.ops) - 1
        for resource in resources:
            self._last[resource] = index
        return index


def _with_phases(events: tuple[Event, ...]) -> list[tuple[Event, Phase]]:
    """Return each event with its phase.

    A gather has the phase of the compute after it, a reduction the phase of the compute before it.
    """
    phases: list[Phase] = ["optimizer"] * len(events)
    following: Phase | None = None
    for index in reversed(range(len(events))):
        event = events[index]
        if isinstance(event, Compute):
            following = event.phase
        phases[index] = following or "backward"
    previous: Phase = "forward"
    for index, event in enumerate(events):
        if isinstance(event, Compute):
            previous = event.phase
        elif isinstance(event, Reduce):
            phases[index] = previous
    return list(zip(events, phases, strict=True))
