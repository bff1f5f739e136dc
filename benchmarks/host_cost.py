"""What a gather or a reduction costs the host: CPU time of the thread that calls, beside FSDP2's own.

    python benchmarks/host_cost.py

One process stands for rank 0 of 64 and of 1024 ranks, 8 on each node. Its process groups send nothing: each
call goes through torch's dispatcher to a `fake` group of one rank (larger ones copy as often as they have
ranks). Kernels do nothing (`--kernels`: those of the CPU, on shards of 64 elements). What is left is what a
training process spends before it can go on, on any device; launches of a GPU's kernels come on top. Hops run
as the backend's collectives, as on a GPU, not as messages from rank to rank, which take their place on a CPU.
Calls of ours and of FSDP2's own comms alternate; the best of several rounds counts.
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
SHARD, SHARD_OF_TWO_CHUNKS = 64, 256  # elements; chunks are of whole blocks


@dataclass
class Options:
    """What to measure."""

    world_sizes: tuple[int, ...] = (64, 1024)
    calls: int = 100
    """In a round."""
    rounds: int = 7
    kernels: bool = False
    """Encode and decode with the kernels of the CPU: at 1024 ranks that is work on 65,536 elements."""
    two_chunks: bool = False
    """Cut each buffer in two, as buffers of large units are."""
    profile: bool = False
    """Show which functions take the time of ours, instead."""


class Idle(dist.ProcessGroup):
    """A process group of which this process is rank 0, and which sends nothing."""

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
    """A group of these ranks, known to torch.distributed by them."""
    group = Idle(len(ranks))
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


Calls = dict[str, tuple[Callable[[], object], Callable[[], object]]]


def prepare(world_size: int, elements: int) -> Calls:
    """For each kind of call, on shards of so many elements: ours, and FSDP2's own."""
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
            for call in (ours, theirs):  # kernels compile, layouts are built
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
