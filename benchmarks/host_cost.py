"""What a gather or a reduction costs the host: Python and dispatch of one call, beside FSDP2's own.

    python benchmarks/host_cost.py

One process stands for rank 0 of 64 and of 1024 ranks, 8 on each node. Its process groups do nothing (torch's
`fake` ones copy as often as a group has ranks), and shards are so small that kernels take next to no time.
What is left is what a training process spends before it can go on, on any device. Hops run as the backend's
collectives, as on a GPU, not as messages from rank to rank, which take their place on a CPU. Calls of ours
and of FSDP2's own comms alternate; the best of several rounds counts.
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
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeropp import Config
from zeropp.comm import AllGather, Ledger, ReduceScatter, Scratch, Wire, chunks, wire
from zeropp.topology import Hop, Topology

PER_NODE, SHARD = 8, 64


@dataclass
class Options:
    """What to measure."""

    world_sizes: tuple[int, ...] = (64, 1024)
    calls: int = 100
    """In a round."""
    rounds: int = 7
    two_chunks: bool = False
    """Cut each buffer in two, as buffers of large units are."""
    profile: bool = False
    """Show which functions take the time of ours, instead."""


class Idle(dist.ProcessGroup):
    """A process group that is done at once."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]  # as torch's own tests do
        self._size = size
        future: Any = torch.futures.Future()
        future.set_result(None)
        self._work = _create_work_from_future(future)

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "idle"

    def _at_once(self, *args: Any) -> Any:
        return self._work

    _allgather_base = _at_once  # type: ignore[assignment]
    _reduce_scatter_base = _at_once  # type: ignore[assignment]
    alltoall_base = _at_once  # type: ignore[assignment]


def idle(ranks: list[int]) -> Idle:
    """A group of these ranks, known to torch.distributed by them."""
    group = Idle(len(ranks))
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


Calls = dict[str, tuple[Callable[[], object], Callable[[], object]]]


def prepare(world_size: int) -> Calls:
    """For each kind of call: ours, and FSDP2's own."""
    group, nodes = idle(list(range(world_size))), world_size // PER_NODE
    topology = Topology(tuple(range(world_size)), tuple(r // PER_NODE for r in range(world_size)), rank=0)
    hops = (
        Hop("across", nodes, idle(list(range(0, world_size, PER_NODE)))),
        Hop("in-node", PER_NODE, idle(list(range(PER_NODE)))),
    )
    unit = Wire("unit", topology, Ledger(), Scratch())
    config = Config(node_size=PER_NODE)
    all_gather, reduce_scatter = AllGather(unit, hops, config), ReduceScatter(unit, hops[::-1], config)
    full, shard = torch.zeros(world_size * SHARD), torch.zeros(SHARD)
    mine = full[:SHARD]

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
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e3


def main(options: Options) -> None:
    torch.set_num_threads(1)
    if options.two_chunks:
        chunks.MIN_CHUNK_ELEMENTS = 1
    wire._is_direct = lambda hop, pieces: False
    table = Table(title="milliseconds of the host per call")
    for column in ("ranks", "call", "zeropp", "FSDP2", "ratio"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for world_size in options.world_sizes:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        for name, (ours, theirs) in prepare(world_size).items():
            for call in (ours, theirs):  # kernels compile, layouts are built
                call()
            if options.profile:
                with cProfile.Profile() as profile:
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
