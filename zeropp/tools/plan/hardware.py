"""Hardware: the numbers that turn a trace into seconds, from the catalog, a file, or the command line.

    compute   FLOPs / (peak * achievable share) + bytes touched / memory rate
    hop       latency of its steps + bytes / rate of the link, for each chunk
    codec     elements / speed

[Note: Shared links]
Inside a node each rank has its own link. The ranks of a node share the node's link to other nodes, and send
concurrently. A flat ring uses both kinds of links, and the slower one decides.

[Note: Overlap]
With `overlap`, communication and compute run concurrently, as on FSDP2's streams. Codec kernels run on the
streams of the communication, and slow compute down by their own time.
Without `overlap`, one thread runs everything in the order of the program and waits for each collective. This
is FSDP2 with gloo on a CPU. (zeropp's Configs overlap there, too: cpu/comm_threads.py.) The thread encodes
one chunk while another one is on the wire, and nothing else is concurrent. The same cores move the bytes,
which costs the thread `host_ns_per_byte`.
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
"""Bytes of an encoded element. Codecs without a measured speed run at the rate of the memory."""
WIDE_BYTES = 2.0
"""Bytes of an element before it is encoded, for the same codecs."""
PARSE_ERRORS = (json.JSONDecodeError, tomllib.TOMLDecodeError)


@dataclass(frozen=True)
class Cost:
    """Measured cost of a collective on one kind of link. A call takes latency_us + bytes * ns_per_byte."""

    latency_us: float
    ns_per_byte: float


@dataclass(frozen=True)
class CodecSpeed:
    """Million elements per second of one rank, while all ranks of its node run the same codec."""

    encode_m_s: float
    decode_m_s: float


@dataclass(frozen=True)
class Hardware:
    """One rank, its node, and the links. All rates are in one direction."""

    name: str
    source: str
    """Origin of the numbers."""
    ranks_per_node: int
    peak_tflops: float
    """Peak of one rank, in the dtype of the matrix products."""
    compute_share: float
    """Share of the peak that the model's matrix products reach, 0 to 1."""
    memory_gib: float
    """Memory of one rank."""
    memory_gbyte_s: float
    """Rate of one rank's memory."""
    in_node_gbyte_s: float | None
    """Rate from one rank to others of its node. This number and the next three are None if unknown."""
    in_node_latency_us: float | None
    """Latency of one step of a collective inside the node."""
    link_gbit_s: float | None
    """Rate from one node to others, over all of its network cards."""
    link_latency_us: float | None
    """Latency of one step of a collective across nodes."""
    overlap: bool = True
    """Whether communication and compute run concurrently. See [Note: Overlap]."""
    host_ns_per_byte: float = 0.0
    """Core time that each sent byte takes from compute. Zero if network cards move the data."""
    core_wait_us: float = 0.0
    """Additional time of a hop while all ranks compute, because communication threads wait for a core."""
    codecs: Mapping[str, CodecSpeed] = field(default_factory=dict)
    """Speeds of codecs, by name. Other codecs run at the rate of the memory."""
    measured: Mapping[str, Cost] = field(default_factory=dict)
    """Measured hops, by "pattern level", such as "all_gather across". They replace rates and latencies. Keys
    that end with "plain" are for the backend's own collective, as FSDP2 calls it."""

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
        """Return a copy with other numbers. A new rate or latency drops costs measured on the old link.

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

    def require(self, name: str) -> float:
        """Return a number of a link. Raises ValueError if it is unknown."""
        value: float | None = getattr(self, name)
        if value is None:
            raise ValueError(
                f"{name} of hardware {self.name!r} is not known ({self.source}); set it with "
                f"--{name.replace('_', '-')}, or run zeropp doctor on nodes with such a link"
            )
        return value

    def uses_comm_threads(self, trace: Trace) -> bool:
        """Return whether zeropp's CPU threads communicate, because the hardware has no streams."""
        return trace.overlaps and not self.overlap

    def memory_of(self, trace: Trace) -> MemoryEstimate:
        """Return the memory that the trace needs on this hardware."""
        if not self.uses_comm_threads(trace):
            return trace.memory
        return replace(trace.memory, communication=trace.memory.communication + trace.comm_thread_bytes)

    def has_room_for(self, trace: Trace) -> bool:
        return self.memory_of(trace).peak <= self.memory_gib * 2**30

    def compute_seconds(self, work: Compute) -> float:
        products = work.flops / (self.peak_tflops * 1e12 * self.compute_share)
        return products + work.bytes_touched / (self.memory_gbyte_s * 1e9)

    def hop_seconds(self, hop: TracedHop, nodes: int, ranks_per_node: int) -> tuple[float, float]:
        """Return the seconds of one chunk on the links inside the node, and on the link between nodes.

        The chunk takes as long as the longer of the two.
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
            latency += steps_in_node * self.require("in_node_latency_us") * 1e-6
        if steps_across:
            latency += steps_across * self.require("link_latency_us") * 1e-6
        in_node = across = 0.0
        if hop.level != "across" and ranks_per_node > 1:
            in_node = inside / (self.require("in_node_gbyte_s") * 1e9) + latency
        if hop.level != "in-node":
            across = outside * 8 / (self.require("link_gbit_s") * 1e9) + latency
        return in_node, across

    def _measured(self, hop: TracedHop) -> Cost | None:
        key = f"{hop.pattern} {hop.level}"
        is_plain = hop.encoded == hop.decoded == 0
        return self.measured.get(f"{key} plain" if is_plain and f"{key} plain" in self.measured else key)

    def host_seconds(self, hop: TracedHop) -> float:
        """Return the core time that one chunk of the hop takes from compute."""
        return hop.wire_bytes / hop.chunks * self.host_ns_per_byte * 1e-9

    def encode_seconds(self, codec: str, elements: float) -> float:
        speed = self.codecs.get(codec)
        return elements / (speed.encode_m_s * 1e6) if speed else self._pass_seconds(codec, elements)

    def decode_seconds(self, codec: str, elements: float) -> float:
        speed = self.codecs.get(codec)
        return elements / (speed.decode_m_s * 1e6) if speed else self._pass_seconds(codec, elements)

    def _pass_seconds(self, codec: str, elements: float) -> float:
        """Return the seconds of one pass over memory: elements on one side, encoded bytes on the other."""
        return elements * (CODEC_BYTES[codec] + WIDE_BYTES) / (self.memory_gbyte_s * 1e9)

    def save(self, path: Path) -> None:
        write_file(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Hardware:
        """Read a file that `save` has written, or TOML with the same keys."""
        try:
            raw = tomllib.loads(path.read_text()) if path.suffix == ".toml" else json.loads(path.read_text())
            raw["codecs"] = {name: CodecSpeed(**speed) for name, speed in raw.get("codecs", {}).items()}
            raw["measured"] = {name: Cost(**cost) for name, cost in raw.get("measured", {}).items()}
            return cls(**raw)
        except (TypeError, AttributeError, UnicodeDecodeError, *PARSE_ERRORS) as error:
            names = ", ".join(entry.name for entry in dataclasses.fields(cls))
            raise ValueError(
                f"{path} is not a hardware file ({error}); expected JSON or TOML with {names}; "
                "`zeropp doctor` writes one"
            ) from None


def _steps(hop: TracedHop, nodes: int) -> tuple[int, int]:
    """Return the number of consecutive steps of a hop, inside the node and across nodes."""
    if hop.pattern == "all_to_all":  # one step: a rank sends to all others concurrently
        return (0, 1) if hop.level != "in-node" else (1, 0)
    rounds = 2 if hop.pattern == "all_reduce" else 1
    steps = rounds * (hop.ranks - 1)
    if hop.level == "in-node":
        return steps, 0
    if hop.level == "across":
        return 0, steps
    across = rounds * nodes  # a flat ring leaves each node once per round
    return max(0, steps - across), min(steps, across)


def _check_positive(name: str, value: float | None, *, or_zero: bool = False) -> None:
    if value is not None and not (value > 0 or (or_zero and value == 0)):
        expected = "zero or a positive number" if or_zero else "a positive number"
        raise ValueError(f"{name} is {value!r}; expected {expected}")
