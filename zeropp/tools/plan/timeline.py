"""The timeline: when each part of a step runs, and on what. A discrete-event simulation, not a sum.

Every operation waits for the operation before it on its resource, and for those that it needs; then it takes
its time. Resources serve in the order in which the program starts things, as CUDA streams and NCCL
communicators do. So the timeline is the longest path through a fixed graph: a faster link, a faster codec or
less compute can never make a step longer, and nothing has to be searched.

[Note: FSDP2's schedule] (torch/distributed/fsdp/_fully_shard)
- Compute of a unit waits for its gather.
- Forward: the program runs ahead of the device, so gathers follow each other; but the gather after next waits
  until this one's buffer was copied out, right before compute: two are in flight.
- Backward: once the weights of a unit are there, the gather of the next unit starts (explicit prefetch).
- A reduction starts when the unit's gradients are there; compute goes on. Before the next reduction starts,
  compute waits for the one before: one is in flight.
- HSDP's all-reduce follows the reduction on a stream of its own; nothing waits for it but the end.
- When backward ends, and before the optimizer, everything waits for everything.
Without overlap (see hardware.py), all of this happens in one thread, in order.

[Note: Schedule of lanes] (cpu/comm_threads.py, cpu/overlap.py)
On a CPU zeropp has lanes in the place of streams. Gathers start when FSDP2's would, and what differs is:
- A lane has two collectives at work. While one waits for the wire, the next one is encoded.
- Before the next reduction starts, compute waits until the one before has encoded its gradients. (Not if it
  is a ring, which sums them up to the end.)
- When a hop is over, its lane has to get a core back from what computes (`Hardware.core_wait_us`).
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
"""What a step spends its time on."""


@dataclass(frozen=True)
class Op:
    """One thing that happens, on one resource or two."""

    name: str
    kind: Kind
    phase: Phase
    resources: tuple[str, ...]
    start: float
    end: float
    after: int | None
    """Index of the operation whose end decided when this one starts."""
    beside: bool = False
    """Time that compute loses to what runs beside it: counted there already."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """One optimizer step."""

    ops: tuple[Op, ...]
    trace: Trace

    @property
    def step_seconds(self) -> float:
        return max((op.end for op in self.ops), default=0.0)

    @property
    def busy_seconds(self) -> dict[Kind, float]:
        """How long each kind of work takes, overlapped or not."""
        busy: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        for op in self.ops:
            if op.kind != "wait" and not op.beside:
                busy[op.kind] += op.seconds
        return busy

    @property
    def critical_seconds(self) -> dict[Kind, float]:
        """The step, split by what it was waiting for: the longest path, by kind of work."""
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
        """What the step spends most of its time waiting for."""
        split = self.critical_seconds
        return max(split, key=lambda kind: split[kind])

    def phases(self) -> list[tuple[Phase, float, float]]:
        """Each phase of each micro-batch, with when it starts and ends. Recomputation is part of backward."""
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
        """How long each phase lasts, of all micro-batches together."""
        seconds: dict[Phase, float] = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        for phase, start, end in self.phases():
            seconds[phase] += end - start
        return seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all ranks together train on in a second."""
        return self.trace.tokens * self.trace.nodes * self.trace.ranks_per_node / self.step_seconds

    @property
    def tflops(self) -> float:
        """Rate of one rank over the whole step, recomputation included."""
        return self.trace.flops / self.step_seconds / 1e12


def simulate(trace: Trace, hardware: Hardware) -> Timeline:
    """Lay out one step of `trace` on `hardware`."""
    builder = _Builder(trace, hardware)
    for event, phase in _with_phases(trace.events):
        builder.add_event(event, phase)
    return Timeline(tuple(builder.ops), trace)


@dataclass
class _Unit:
    """What is known about the gathers of one unit."""

    gathered: int | None = None
    """Last operation of its last gather."""
    used: bool = True
    """Whether compute has waited for it."""


@dataclass
class _Builder:
    trace: Trace
    hardware: Hardware
    ops: list[Op] = field(default_factory=list)
    _last: dict[str, int] = field(default_factory=dict)
    """Last operation of each resource."""
    _units: dict[str, _Unit] = field(default_factory=dict)
    _copied_out: list[int] = field(default_factory=list)
    """For each gather that was used, the operation that waited for it."""
    _in_flight: str | None = None
    """Unit of the gather that was started last."""
    _gradients_free: int | None = None
    """Operation after which the gradients of the last reduction may go."""
    _encoded: int | None = None
    """Last operation before the last chunk of a collective goes on the wire."""
    _started: Counter[Direction] = field(default_factory=Counter)
    """Collectives of each lane."""
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
            ready = self._copied_out[-2:-1]
        else:
            if self._in_flight is not None:
                self._use(self._in_flight)
            ready = self._copied_out[-1:]
        stream = self._stream("gather")
        self._wait(stream, ready)
        end = self._collective(f"gather {gather.unit}", gather.hops, stream)
        self._units[gather.unit] = _Unit(end, used=False)
        self._in_flight = gather.unit

    def _reduce(self, reduce: Reduce) -> None:
        stream = self._stream("reduce")
        if self._gradients_free is not None:
            self._wait("compute", [self._gradients_free])
        scattered = tuple(hop for hop in reduce.hops if hop.pattern != "all_reduce")
        replicated = tuple(hop for hop in reduce.hops if hop.pattern == "all_reduce")
        self._wait(stream, self._latest("compute"))
        end = self._collective(f"reduce {reduce.unit}", scattered, stream)
        is_read_early = self.hardware.has_lanes(self.trace) and any(
            hop.pattern == "all_to_all" for hop in scattered
        )
        self._gradients_free = self._encoded if is_read_early else end
        if replicated:
            stream = "compute" if stream == "compute" else "all-reduce"
            self._wait(stream, [end])
            self._collective(f"reduce {reduce.unit}", replicated, stream)

    def _stream(self, direction: Direction) -> str:
        """What the next collective runs on."""
        if not self.hardware.has_lanes(self.trace):
            return direction if self.hardware.overlap else "compute"
        place = self._started[direction] % MAX_TRANSFERS
        self._started[direction] += 1
        return f"{direction} {place + 1}" if place else direction

    def _use(self, unit: str) -> None:
        """Compute waits for the unit's weights."""
        known = self._units.get(unit)
        if known is not None and not known.used and known.gathered is not None:
            self._copied_out.append(self._wait("compute", [known.gathered]))
            known.used = True

    def _collective(self, name: str, hops: tuple[TracedHop, ...], stream: str) -> int:
        """Chunk by chunk, in the order in which the pipeline advances them. Returns the last operation."""
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
                self._add(f"host {name}", "compute", ["compute"], host, beside=True)
            yield
            self._wait(stream, [on_wire])
            if self.hardware.has_lanes(self.trace) and self.hardware.core_wait_us:
                wait = self.hardware.core_wait_us * 1e-6
                self._add(f"core for {name}", "compute", [stream], wait, beside=True)
            decode = self.hardware.decode_seconds(hop.codec, hop.decoded / hop.chunks)
            self._codec(f"decode {name}", decode, stream)

    def _codec(self, name: str, seconds: float, stream: str) -> None:
        if not seconds:
            return
        self._add(name, "codec", [stream], seconds)
        if stream != "compute":
            self._add(name, "codec", ["compute"], seconds, beside=True)

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
        self._gradients_free, self._in_flight = None, None
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
        beside: bool = False,
    ) -> int:
        needs = [*after, *(index for resource in resources for index in self._latest(resource))]
        decided = max(needs, key=lambda index: self.ops[index].end, default=None)
        start = 0.0 if decided is None else self.ops[decided].end
        op = Op(name, kind, self._phase, tuple(resources), start, start + seconds, decided, beside)
        self.ops.append(op)
        index = len(self.ops) - 1
        for resource in resources:
            self._last[resource] = index
        return index


def _with_phases(events: tuple[Event, ...]) -> list[tuple[Event, Phase]]:
    """Each event with its phase; a gather or a reduction has that of the compute around it.

    A gather belongs to the compute that comes next, a reduction to the one before.
    """
    phases: list[Phase] = ["optimizer"] * len(events)
    coming: Phase | None = None
    for index in reversed(range(len(events))):
        event = events[index]
        if isinstance(event, Compute):
            coming = event.phase
        phases[index] = coming or "backward"
    done: Phase = "forward"
    for index, event in enumerate(events):
        if isinstance(event, Compute):
            done = event.phase
        elif isinstance(event, Reduce):
            phases[index] = done
    return list(zip(events, phases, strict=True))
