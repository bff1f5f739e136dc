"""Hardware: the numbers that turn a trace into seconds. By name, from a file, or given one by one.

    compute   FLOPs / (peak * achievable share) + bytes touched / memory rate
    hop       latency of its steps + bytes / rate of the link, once for each chunk
    codec     elements / speed

[Note: What shares a link]
Inside a node every rank has a link of its own. The link across nodes is the node's: its ranks send at the
same time and share the rate. A flat ring uses both, and the slower of the two decides.

[Note: Overlap]
With `overlap`, communication and compute run beside each other as FSDP2's streams do. Codec kernels then run
on the streams of the communication, and take their time away from compute.
Without it, one thread does everything in the order of the program and waits for each collective: FSDP2 with
gloo on CPU. (zeropp's own Configs overlap there, too: cpu/overlap.py.) What runs beside the thread is only
the wire of one chunk while it encodes another, and that costs it `host_ns_per_byte`, because the bytes are
moved by the same cores.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..atomic_files import write_file
from .memory_estimate import MemoryEstimate
from .trace import Compute, Trace, TracedHop

CODEC_BYTES = {"none": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes of an encoded element, for codecs whose speed is not known: they run at the rate of the memory."""
NOT_PARSED = (json.JSONDecodeError, tomllib.TOMLDecodeError)
WIDE_BYTES = 2.0
"""Bytes of an element in memory, for the same."""


@dataclass(frozen=True)
class Cost:
    """One collective on one kind of link, as measured: calls take latency_us + wire bytes * ns_per_byte."""

    latency_us: float
    ns_per_byte: float


@dataclass(frozen=True)
class CodecSpeed:
    """Million elements per second of one rank, while all ranks of its node do the same."""

    encode_m_s: float
    decode_m_s: float


@dataclass(frozen=True)
class Hardware:
    """One rank, its node, and the links. All rates are in one direction."""

    name: str
    source: str
    """Where the numbers come from."""
    ranks_per_node: int
    peak_tflops: float
    """Peak of one rank, in the dtype of the matrix products."""
    compute_share: float
    """How much of the peak the model's matrix products reach, 0 to 1."""
    memory_gib: float
    """Memory of one rank."""
    memory_gbyte_s: float
    """Rate of one rank's memory."""
    in_node_gbyte_s: float | None
    """Rate from one rank to others of its node. This and the next three: None if nobody has measured it."""
    in_node_latency_us: float | None
    """Latency of one step of a collective inside the node."""
    link_gbit_s: float | None
    """Rate from one node to others: all its network cards together."""
    link_latency_us: float | None
    """Latency of one step of a collective across nodes."""
    overlap: bool = True
    """See [Note: Overlap]."""
    host_ns_per_byte: float = 0.0
    """Time that the cores lose to compute for each byte that a rank sends. Zero where cards move the data."""
    core_wait_us: float = 0.0
    """How much longer a hop takes while all ranks compute: the threads that send wait for a core."""
    codecs: Mapping[str, CodecSpeed] = field(default_factory=dict)
    """Speeds of codecs, by name; those that are not here run at the rate of the memory."""
    measured: Mapping[str, Cost] = field(default_factory=dict)
    """Measured hops, by "pattern level", such as "all_gather across": used in the place of rates and
    latencies. With "plain" behind it: as FSDP2 sends, by the backend's own collective."""

    def __post_init__(self) -> None:
        for name in ("peak_tflops", "memory_gib", "memory_gbyte_s", "in_node_gbyte_s", "link_gbit_s"):
            _check_positive(name, getattr(self, name))
        for name in ("in_node_latency_us", "link_latency_us", "host_ns_per_byte", "core_wait_us"):
            _check_positive(name, getattr(self, name), or_zero=True)
        if not 0 < self.compute_share <= 1:
            raise ValueError(f"compute_share is {self.compute_share!r}; expected a share of the peak, 0 to 1")
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node is {self.ranks_per_node!r}; expected a positive number")

    def changed(self, **numbers: Any) -> Hardware:
        """This one with other numbers. A new link rate or latency drops what was measured across nodes with
        the old.

        >>> Hardware("x", "", 8, 312, 0.5, 80, 2039, 300, 3.4, 100, 14).changed(link_gbit_s=400).link_gbit_s
        400
        """
        changes = {name: value for name, value in numbers.items() if value is not None}
        if not changes:
            return self
        dropped = {
            "across": {"link_gbit_s", "link_latency_us"},
            "in-node": {"in_node_gbyte_s", "in_node_latency_us"},
            "flat": {"link_gbit_s", "link_latency_us", "in_node_gbyte_s", "in_node_latency_us"},
        }
        kept = {
            key: cost for key, cost in self.measured.items() if not dropped[key.split()[1]] & set(changes)
        }
        return replace(self, measured=kept, **changes)

    def known(self, name: str) -> float:
        """A number of a link, or an error if nobody has measured it."""
        value: float | None = getattr(self, name)
        if value is None:
            raise ValueError(
                f"{name} of hardware {self.name!r} is not known ({self.source}); give it with "
                f"--{name.replace('_', '-')}, or run zeropp doctor on nodes that have such a link"
            )
        return value

    def has_lanes(self, trace: Trace) -> bool:
        """Whether zeropp's own threads send, because there are no streams."""
        return trace.overlaps and not self.overlap

    def memory_of(self, trace: Trace) -> MemoryEstimate:
        """What the trace needs on this hardware."""
        if not self.has_lanes(trace):
            return trace.memory
        return replace(trace.memory, communication=trace.memory.communication + trace.lanes_bytes)

    def has_room_for(self, trace: Trace) -> bool:
        return self.memory_of(trace).peak <= self.memory_gib * 2**30

    def compute_seconds(self, work: Compute) -> float:
        products = work.flops / (self.peak_tflops * 1e12 * self.compute_share)
        return products + work.bytes_touched / (self.memory_gbyte_s * 1e9)

    def hop_seconds(self, hop: TracedHop, nodes: int, ranks_per_node: int) -> tuple[float, float]:
        """How long one chunk of the hop takes on the links inside the node, and on the node's link to others.

        The hop takes as long as the longer of the two.
        """
        if hop.ranks == 1:
            return 0.0, 0.0
        cost = self._measured(hop)
        if cost is not None:
            seconds = cost.latency_us * 1e-6 + hop.wire_bytes / hop.chunks * cost.ns_per_byte * 1e-9
            return (seconds if hop.level != "across" else 0.0), (seconds if hop.level != "in-node" else 0.0)
        steps_in_node, steps_across = _steps(hop, nodes)
        inside, outside = hop.wire_bytes / hop.chunks, hop.across_bytes * ranks_per_node / hop.chunks
        latency = 0.0
        if steps_in_node:
            latency += steps_in_node * self.known("in_node_latency_us") * 1e-6
        if steps_across:
            latency += steps_across * self.known("link_latency_us") * 1e-6
        in_node = across = 0.0
        if hop.level != "across" and ranks_per_node > 1:
            in_node = inside / (self.known("in_node_gbyte_s") * 1e9) + latency
        if hop.level != "in-node":
            across = outside * 8 / (self.known("link_gbit_s") * 1e9) + latency
        return in_node, across

    def _measured(self, hop: TracedHop) -> Cost | None:
        key = f"{hop.pattern} {hop.level}"
        is_plain = hop.encoded == hop.decoded == 0
        return self.measured.get(f"{key} plain" if is_plain and f"{key} plain" in self.measured else key)

    def host_seconds(self, hop: TracedHop) -> float:
        """What moving one chunk of the hop costs the cores."""
        return hop.wire_bytes / hop.chunks * self.host_ns_per_byte * 1e-9

    def encode_seconds(self, codec: str, elements: float) -> float:
        speed = self.codecs.get(codec)
        return elements / (speed.encode_m_s * 1e6) if speed else self._pass_seconds(codec, elements)

    def decode_seconds(self, codec: str, elements: float) -> float:
        speed = self.codecs.get(codec)
        return elements / (speed.decode_m_s * 1e6) if speed else self._pass_seconds(codec, elements)

    def _pass_seconds(self, codec: str, elements: float) -> float:
        """One pass over memory: elements on one side, bytes of the wire on the other."""
        return elements * (CODEC_BYTES[codec] + WIDE_BYTES) / (self.memory_gbyte_s * 1e9)

    def save(self, path: Path) -> None:
        write_file(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Hardware:
        """Read a file that `save` wrote, or TOML with the same keys."""
        try:
            raw = tomllib.loads(path.read_text()) if path.suffix == ".toml" else json.loads(path.read_text())
            raw["codecs"] = {name: CodecSpeed(**speed) for name, speed in raw.get("codecs", {}).items()}
            raw["measured"] = {name: Cost(**cost) for name, cost in raw.get("measured", {}).items()}
            return cls(**raw)
        except (TypeError, AttributeError, UnicodeDecodeError, *NOT_PARSED) as error:
            names = ", ".join(entry.name for entry in dataclasses.fields(cls))
            raise ValueError(
                f"{path} is no hardware file ({error}); expected JSON or TOML with {names}; "
                "`zeropp doctor` writes one"
            ) from None


def _steps(hop: TracedHop, nodes: int) -> tuple[int, int]:
    """Latencies that one piece of data meets: of steps inside the node, and of steps across."""
    if hop.pattern == "all_to_all":  # to all at once
        return (0, 1) if hop.level != "in-node" else (1, 0)
    rounds = 2 if hop.pattern == "all_reduce" else 1
    steps = rounds * (hop.ranks - 1)
    if hop.level == "in-node":
        return steps, 0
    if hop.level == "across":
        return 0, steps
    across = rounds * nodes  # a flat ring leaves each node once
    return max(0, steps - across), min(steps, across)


def _check_positive(name: str, value: float | None, *, or_zero: bool = False) -> None:
    if value is not None and not (value > 0 or (or_zero and value == 0)):
        raise ValueError(f"{name} is {value!r}; expected a positive number")
