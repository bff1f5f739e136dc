"""Host cost of a gather and of a reduction: CPU time of the calling thread, for zeropp and for FSDP2's comms.

    python benchmarks/host_cost.py

One process simulates rank 0 of 64 and of 1024 ranks, 8 per node. Its process groups send nothing: each call
goes through torch's dispatcher to a `fake` group of one rank (a larger fake group copies once per rank).
Kernels do nothing; with `--kernels`, they are those of the CPU, on shards of 64 elements. The result is the
time that a call takes from the training thread on any device, without launches of GPU kernels. Hops are
collectives of the backend, as on a GPU, and not messages between ranks, as on a CPU. Calls of zeropp and
FSDP2 alternate, and the best of several rounds counts.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeropp import Config
from zeropp.comm import AllGather, Ledger, ReduceScatter, Scratch, Wire, chunks, wire
from zeropp.quant import dispatch
from zeropp.quant import noop as dry
from zeropp.topology import Hop, Topology

PER_NODE = 8
SHARD, SHARD_OF_TWO_CHUNKS = 64, 256  # elements; a chunk has whole blocks


@dataclass
class Options:
    """The measurement."""

    world_sizes: tuple[int, ...] = (64, 1024)
    calls: int = 100
    """Calls per round."""
    rounds: int = 7
    kernels: bool = False
    """Encode and decode with the CPU's kernels: 65,536 elements at 1024 ranks."""
    two_chunks: bool = False
    """Split each buffer into two chunks, like the buffers of large units."""
    profile: bool = False
    """Print a profile of zeropp's functions instead of the table."""


class Idle(dist.ProcessGroup):
    """A process group that sends nothing. This process is its rank 0."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]  # as torch's own tests do
        self._size = size
        self._alone: Any = dist.group.WORLD

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "idle"

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self._alone.all_gather_single(input, input, opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self._alone.reduce_scatter_single(output, output, opts)

    def all_to_all_single(self, output: Any, input: Any, *options: Any) -> Any:
        return self._alone.all_to_all_single(output, input, *options)


def idle(ranks: list[int]) -> Idle:
    """Return an idle group of these ranks, registered in torch.distributed."""
    group = Idle(len(ranks))
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


Calls = dict[str, tuple[Callable[[], object], Callable[[], object]]]


def prepare(world_size: int, elements: int) -> Calls:
    """Return zeropp's and FSDP2's calls by kind, on shards of `elements`."""
    group, nodes = idle(list(range(world_size))), world_size // PER_NODE
    topology = Topology(tuple(range(world_size)), tuple(r // PER_NODE for r in range(world_size)), rank=0)
    hops = (
        Hop("across", nodes, idle(list(range(0, world_size, PER_NODE)))),
        Hop("in-node", PER_NODE, idle(list(range(PER_NODE)))),
    )
    unit = Wire("unit", topology, Ledger(), Scratch())
    config = Config(node_size=PER_NODE)
    all_gather, reduce_scatter = AllGather(unit, hops, config), ReduceScatter(unit, hops[::-1], config)
    full, shard = torch.zeros(world_size * elements), torch.zeros(elements)
    mine = full[:elements]

    def gather() -> None:
        all_gather.after_step()
        all_gather(full, mine, group)

    def own_gather() -> None:
        DefaultAllGather()(output_tensor=full, input_tensor=mine, group=group)

    def reduce() -> None:
        reduce_scatter(shard, full, group, dist.ReduceOp.AVG)

    def own_reduce() -> None:
        DefaultReduceScatter()(output_tensor=shard, input_tensor=full, group=group, op=dist.ReduceOp.AVG)

    return {
        "gather": (gather, own_gather),
        "gather, node shard used again": (lambda: all_gather(full, mine, group), own_gather),
        "reduction": (reduce, own_reduce),
    }


def milliseconds(call: Callable[[], object], calls: int) -> float:
    start = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - start) / calls * 1e3


def main(options: Options) -> None:
    torch.set_num_threads(1)
    elements = SHARD
    if options.two_chunks:
        chunks.MIN_CHUNK_ELEMENTS, elements = 1, SHARD_OF_TWO_CHUNKS
    if not options.kernels:
        dispatch._implementation = lambda device_type: dry  # type: ignore[assignment]  # was cached
    wire._is_direct = lambda hop, pieces: False
    table = Table(title="milliseconds of CPU per call")
    for column in ("ranks", "call", "zeropp", "FSDP2", "ratio"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for world_size in options.world_sizes:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        for name, (ours, theirs) in prepare(world_size, elements).items():
            for call in (ours, theirs):  # the first call compiles kernels and builds layouts
                call()
            if options.profile:
                with cProfile.Profile(time.thread_time) as profile:
                    milliseconds(ours, options.calls)
                pstats.Stats(profile).sort_stats("tottime").print_stats(35)
                continue
            rounds = [
                (milliseconds(ours, options.calls), milliseconds(theirs, options.calls))
                for _ in range(options.rounds)
            ]
            best, own = min(ms for ms, _ in rounds), min(ms for _, ms in rounds)
            table.add_row(str(world_size), name, f"{best:.3f}", f"{own:.3f}", f"{best / own:.1f}x")
        dist.destroy_process_group()
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
