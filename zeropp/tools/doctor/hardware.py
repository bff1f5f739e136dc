"""Measurement of this cluster by its own ranks, in half a minute: a `Hardware` for the planner.

All ranks run the same calls at the same time, as in training, so they share cores, memory and links here,
too.

    memory      one pass over tensors larger than any cache, into a new tensor
    layers      forward and backward of some GPT layers of the given size, in FSDP2 without communication;
                the time that the memory rate does not explain counts as matrix products
    codecs      encode and decode of each codec, at the size of a chunk
    hops        each of zeropp's hops and FSDP2's own collectives, on each kind of link, at several sizes;
                the fit is latency + bytes * rate
    host        CPU time per sent byte, times the number of ranks that share a core
    core wait   extra time of small hops in a thread, concurrently with the layers

The number of ranks that share a core is the ratio of compute times of all ranks together and of one rank
alone.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...comm import Ledger, Scratch, Wire
from ...comm.bf16_ring import RingReduction
from ...comm.chunks import ChunkPolicy
from ...comm.execution import Inline, run_to_end
from ...config import CodecName, Config
from ...process_groups import world
from ...quant import Segment, make_codec
from ...topology import Hop, Topology
from ..bench.training import send_nothing
from ..bench.workload import HEAD_WIDTH
from ..models.gpt import GPT, GPTConfig
from ..models.sharding import shard_blocks
from ..plan.hardware import CodecSpeed, Cost, Hardware
from ..plan.op_cost import WorkCounter
from ..plan.trace import Level, Pattern
from .timer import LONG_ROUND, Timer

CODECS: tuple[CodecName, ...] = ("none", "bf16", "int8", "int4")
BLOCK_SIZE = 128
CALL_SECONDS = 0.1
"""Larger sizes are skipped after a call that takes longer."""
LAYERS = 3
CONCURRENT_HOPS, PAUSE_SECONDS, SMALL_BYTES = 200, 0.002, 1 << 12
"""Hops that are timed concurrently with compute: their number, seconds between them, and bytes per rank."""
MIN_PRODUCTS_SHARE = 0.2
"""Lower bound on the share of matrix products in a layer's time."""
TOO_FAST_NS = 1e-3
"""Lower bound on the nanoseconds per byte. A faster link cannot be measured at these sizes."""
OURS: dict[Level, tuple[Pattern, ...]] = {
    "in-node": ("all_gather", "all_to_all"),
    "across": ("all_gather", "all_to_all"),
    "flat": ("all_gather", "all_to_all", "reduce_scatter"),
}
"""Hops of zeropp. Its reduce-scatter is the 16-bit ring."""
PLAIN: dict[Level, tuple[Pattern, ...]] = {
    "in-node": ("all_gather", "reduce_scatter"),
    "across": ("all_reduce",),
    "flat": ("all_gather", "reduce_scatter"),
}
"""Collectives of FSDP2: with sharding over all ranks, or inside the node (HSDP)."""


@dataclass(frozen=True)
class Size:
    """Sizes and repeats of the measurement."""

    sequences: int
    """Sequences per micro-batch."""
    sequence: int
    """Tokens per sequence."""
    width: int
    """Width of a layer, a multiple of 64, the width of a head."""
    wire_bytes: tuple[int, ...] = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
    """Bytes that a rank sends in one call of a collective."""
    repeats: int = 5


@dataclass
class Measurement:
    """Measured numbers, which are the same on every rank."""

    hardware: Hardware
    one_rank_gbit_s: float | None
    """Rate across nodes while one rank per node sends; None on one node."""
    points: dict[str, list[tuple[int, float]]]
    """Wire bytes and seconds of each pattern and level."""


def measure(size: Size, device: torch.device, topology: Topology) -> Measurement:
    """Measure this cluster. Collective over an initialized process group."""
    timer = Timer(device, size.repeats)
    # An addition reads two tensors and writes one.
    memory_rate = 3 * _PASS_BYTES / timer.seconds(_memory_pass(device), LONG_ROUND)
    train_layers = _layers(size, device)
    with WorkCounter() as work:
        train_layers()
    together, alone = timer.seconds(train_layers), timer.seconds_alone(train_layers, calls=1)
    in_products = max(together - work.bytes_touched / memory_rate, MIN_PRODUCTS_SHARE * together)
    flops_rate = work.flops / in_products
    codecs: dict[str, CodecSpeed] = {name: _codec_speed(timer, name) for name in CODECS}
    points: dict[str, list[tuple[int, float]]] = {}
    cpu_seconds = wire_bytes = 0.0  # of all calls on this rank
    for name, prepare in _calls(topology, device):
        points[name], cpu = _sizes(timer, prepare, size.wire_bytes)
        cpu_seconds += cpu
        # `Timer.seconds` makes one call before its rounds.
        wire_bytes += sum((1 + size.repeats) * sent for sent, _ in points[name])
    costs = {name: _fit(found) for name, found in points.items()}
    sharing = max(1.0, together / alone)
    hardware = _as_hardware(topology, device, flops_rate, memory_rate, codecs, costs)
    if device.type == "cpu":
        host = timer.mean(cpu_seconds / wire_bytes * 1e9) * sharing
        wait = _core_wait_us(timer, topology, train_layers)
        hardware = hardware.changed(host_ns_per_byte=host, core_wait_us=wait)
    one_rank = _one_rail_gbit_s(timer, topology, size.wire_bytes[-1])
    return Measurement(hardware, one_rank, points)


_PASS_BYTES = 1 << 24


def _layers(size: Size, device: torch.device) -> Callable[[], None]:
    """Return forward and backward of a few layers, with more weights than a core's caches hold.

    Each layer is a unit of FSDP2, because FSDP2's hooks and copies are part of a model's compute."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    config = GPTConfig(layers=LAYERS, width=size.width, heads=size.width // HEAD_WIDTH, context=size.sequence)
    layers = nn.Sequential(*GPT(config).blocks).to(device, dtype)
    shard_blocks(layers, list(layers))
    send_nothing(layers)
    shape = (size.sequences, size.sequence, size.width)
    x, gradient = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    x.requires_grad_()

    def train() -> None:
        layers(x).backward(gradient)
        for tensor in (x, *layers.parameters()):
            tensor.grad = None

    return train


def _memory_pass(device: torch.device) -> Callable[[], Tensor]:
    a, b = (torch.ones(_PASS_BYTES // 4, device=device) for _ in range(2))
    return lambda: torch.add(a, b)


def _codec_speed(timer: Timer, name: CodecName) -> CodecSpeed:
    """Measure one codec on a gradient of 4 rows with 2^18 elements each."""
    rows, numel = 4, 1 << 18
    dtype = torch.float32 if timer.device.type == "cpu" else torch.bfloat16
    codec = make_codec(name, dtype, [Segment(numel, BLOCK_SIZE)])
    source = torch.randn(rows, numel, device=timer.device).to(dtype)
    encoded = torch.empty(rows, codec.row_bytes, dtype=torch.uint8, device=timer.device)
    out = torch.empty_like(source)
    encode = timer.seconds(lambda: codec.encode(source, encoded), LONG_ROUND)
    decode = timer.seconds(lambda: codec.decode(encoded, out), LONG_ROUND)
    return CodecSpeed(rows * numel / encode / 1e6, rows * numel / decode / 1e6)


Prepare = Callable[[int], tuple[Callable[[], object], int]]
"""Return a call that sends about this many wire bytes, and the exact number, as the ledger counts."""


def _calls(topology: Topology, device: torch.device) -> Iterator[tuple[str, Prepare]]:
    """Yield every collective to time, by name."""
    for hop in _hops(topology):
        for pattern in OURS[hop.name]:
            prepare = _prepare_ring if pattern == "reduce_scatter" else partial(_prepare_ours, pattern)
            yield f"{pattern} {hop.name}", partial(prepare, topology, device, hop)
        for pattern in PLAIN[hop.name]:
            name = f"{pattern} {hop.name}" + (" plain" if pattern in OURS[hop.name] else "")
            yield name, partial(_prepare_plain, device, hop.group or world(), pattern)


def _hops(topology: Topology) -> list[Hop]:
    """Return a hop for each kind of link of this cluster."""
    hops = [hop for hop in topology.hops() if hop.size > 1]
    return [*hops, topology.flat_hop()] if len(hops) == 2 else hops


def _sizes(
    timer: Timer, prepare: Prepare, wire_bytes: Sequence[int]
) -> tuple[list[tuple[int, float]], float]:
    """Return wire bytes and seconds at growing sizes, and the CPU time of all calls on this rank."""
    found: list[tuple[int, float]] = []
    cpu_before = time.process_time()
    for wanted in wire_bytes:
        run, sent = prepare(wanted)
        seconds = timer.seconds(run)
        found.append((sent, seconds))
        if seconds > CALL_SECONDS:
            break
    return found, time.process_time() - cpu_before


def _prepare_ours(
    pattern: Pattern, topology: Topology, device: torch.device, hop: Hop, wanted: int
) -> tuple[Callable[[], object], int]:
    wire = Wire("measure", topology, Ledger(), Scratch())
    nbytes = wanted // (hop.size - 1)  # per piece
    pieces, out = (torch.zeros(hop.size, nbytes, dtype=torch.uint8, device=device) for _ in range(2))

    def run() -> None:
        if pattern == "all_gather":
            run_to_end(wire.all_gather(hop, world(), pieces))
        else:
            run_to_end(wire.all_to_all(hop, world(), pieces, out))

    return run, (hop.size - 1) * nbytes


def _prepare_ring(
    topology: Topology, device: torch.device, hop: Hop, wanted: int
) -> tuple[Callable[[], object], int]:
    wire = Wire("measure", topology, Ledger(), Scratch())
    rows = torch.zeros(hop.size, wanted // (hop.size - 1) // 2, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(rows[:1])
    op, cut = dist.ReduceOp.SUM, ChunkPolicy.of(Config.chunks)

    def run() -> None:
        Inline().submit(RingReduction(wire, hop, rows, out, world(), op, factor=1.0, cut=cut))

    return run, (hop.size - 1) * out.nbytes


def _prepare_plain(
    device: torch.device, group: ProcessGroup, pattern: Pattern, wanted: int
) -> tuple[Callable[[], object], int]:
    ranks = group.size()
    rounds = 2 if pattern == "all_reduce" else 1  # a reduce-scatter and an all-gather
    numel = wanted // (ranks - 1) // rounds // 4  # per piece
    piece, pieces = torch.ones(numel, device=device), torch.ones(ranks * numel, device=device)
    calls: dict[Pattern, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_single(pieces, piece, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(piece, pieces, group=group),
        "all_reduce": lambda: dist.all_reduce(pieces, op=dist.ReduceOp.MAX, group=group),
    }
    return calls[pattern], rounds * (ranks - 1) * numel * 4


def _fit(points: list[tuple[int, float]]) -> Cost:
    """Fit seconds = latency + bytes * rate by least squares of relative errors.

    >>> _fit([(1000, 3e-6), (2000, 4e-6), (10_000, 12e-6)])
    Cost(latency_us=2.0, ns_per_byte=1.0)
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_bytes = sum(w * sent for w, (sent, _) in zip(weights, points, strict=True)) / total
    mean_seconds = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(w * (sent - mean_bytes) ** 2 for w, (sent, _) in zip(weights, points, strict=True))
    if spread == 0:  # one size only, so no latency can be fitted
        return Cost(0.0, round(mean_seconds / mean_bytes * 1e9, 6))
    rate = (
        sum(
            w * (sent - mean_bytes) * (seconds - mean_seconds)
            for w, (sent, seconds) in zip(weights, points, strict=True)
        )
        / spread
    )
    rate = max(rate, 0.0)
    latency = max(mean_seconds - rate * mean_bytes, 0.0)
    return Cost(round(latency * 1e6, 3), round(rate * 1e9, 6))


def _core_wait_us(timer: Timer, topology: Topology, compute: Callable[[], None]) -> float:
    """Return the mean extra time of a small hop while all ranks compute in another thread."""

    def seconds_of_hops(run: Callable[[], object]) -> float:
        seconds = 0.0
        for _ in range(CONCURRENT_HOPS):
            time.sleep(PAUSE_SECONDS)  # the thread then waits for a core, as after a long transfer
            seconds += timer.timed(run)
        return seconds / CONCURRENT_HOPS

    longer = []
    for hop in (hop for hop in topology.hops() if hop.size > 1):
        run, _ = _prepare_ours("all_gather", topology, timer.device, hop, SMALL_BYTES)
        idle = timer.seconds(run)
        dist.barrier()
        with ThreadPoolExecutor(1) as thread:
            busy = thread.submit(seconds_of_hops, run)
            while not busy.done():
                compute()  # without communication, so ranks may call it a different number of times
        longer.append(max(0.0, timer.mean(busy.result()) - idle))
    return statistics.mean(longer) * 1e6 if longer else 0.0


def _one_rail_gbit_s(timer: Timer, topology: Topology, wire_bytes: int) -> float | None:
    """Return the rate across nodes while one rank per node sends, to compare with that of all ranks."""
    across = [hop for hop in _hops(topology) if hop.name == "across"]
    if not across:
        return None
    run, sent = _prepare_ours("all_gather", topology, timer.device, across[0], wire_bytes)
    dist.barrier()
    sends = topology.rank in topology.rails[0]
    return sent * 8 / timer.largest(timer.fastest(run) if sends else 0.0) / 1e9


def _as_hardware(
    topology: Topology,
    device: torch.device,
    flops_per_s: float,
    memory_bytes_per_s: float,
    codecs: dict[str, CodecSpeed],
    costs: dict[str, Cost],
) -> Hardware:
    ranks_per_node = len(topology.nodes[0])
    in_node, across = costs.get("all_gather in-node"), costs.get("all_gather across")
    return Hardware(
        name="measured",
        source=f"zeropp doctor: {topology.describe()}, {dist.get_backend()}, torch {torch.__version__}, "
        f"{platform.machine()}, {os.cpu_count()} cores",
        ranks_per_node=ranks_per_node,
        peak_tflops=flops_per_s / 1e12,
        compute_share=1.0,
        memory_gib=_memory_bytes(device) / 2**30,
        memory_gbyte_s=memory_bytes_per_s / 1e9,
        in_node_gbyte_s=None if in_node is None else 1 / max(in_node.ns_per_byte, TOO_FAST_NS),
        in_node_latency_us=None if in_node is None else in_node.latency_us / (ranks_per_node - 1),
        link_gbit_s=None if across is None else 8 * ranks_per_node / max(across.ns_per_byte, TOO_FAST_NS),
        link_latency_us=None if across is None else across.latency_us / (len(topology.nodes) - 1),
        overlap=device.type != "cpu",
        codecs=codecs,
        measured=costs,
    )


def _memory_bytes(device: torch.device) -> float:
    """Return the memory of one rank: the device's, or its share of the machine's available memory."""
    if device.type == "cpu":
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024 / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return float(torch.cuda.get_device_properties(device).total_memory)
