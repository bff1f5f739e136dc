from __future__ import annotations

import pytest

from zeropp.comm import Ledger
from zeropp.comm.ledger import WorkKey
from zeropp.quant.codec import Operation
from zeropp.tools.plan.memory_estimate import MemoryEstimate
from zeropp.tools.plan.trace import Compute, Gather, Reduce, ShardGroup, Trace, TracedHop, all_reduce_hop

ACROSS = TracedHop("across", "all_gather", 2, 100, 100, chunks=1, encoded=50, decoded=0, codec="int8")
IN_NODE = TracedHop("in-node", "all_gather", 4, 300, 0, chunks=1, encoded=0, decoded=400, codec="int8")
FLAT = TracedHop("flat", "reduce_scatter", 8, 700, 200, chunks=1, encoded=0, decoded=0, codec="none")


def test_sums_over_a_step() -> None:
    trace = Trace(
        events=(
            Gather("a", (ACROSS, IN_NODE)),
            Compute("a", "forward", flops=10, bytes_touched=1),
            Compute("a", "backward", flops=20, bytes_touched=2),
            Reduce("a", (FLAT,)),
            Compute("a", "optimizer", flops=0, bytes_touched=3),
        ),
        parameters=50,
        nodes=2,
        ranks_per_node=4,
        micro_batches=1,
        tokens=8,
        memory=MemoryEstimate(1, 2, 3, 4, 5, 6, 7),
    )
    assert trace.flops == 30
    assert list(trace.hops()) == [ACROSS, IN_NODE, FLAT]
    assert trace.memory.peak == 28


def sent(collective: str, *hops: tuple[str, str, dict[Operation, int]]) -> Ledger:
    """Return the ledger of one call of two chunks. Each hop has a codec, and its elements by operation."""
    ledger = Ledger()
    for _ in range(2):
        for hop, codec, work in hops:
            across = 0 if hop in ("in-node", "post-forward") else 10
            ledger.record("a", collective, hop, wire_bytes=30, across_bytes=across)  # type: ignore[arg-type]
            for operation, elements in work.items():
                key = WorkKey("a", collective, hop, operation, codec)  # type: ignore[arg-type]
                ledger.record_work(key, elements)
    return ledger


def test_the_ledger_of_a_call_gives_its_hops() -> None:
    across, in_node = ShardGroup(2, 4).hops_of(
        sent("all_gather", ("across", "int8", {"encode": 5}), ("in-node", "int8", {"decode": 40})), 8
    )
    assert across == TracedHop(
        "across", "all_gather", 2, 60, 20, chunks=2, encoded=10, decoded=0, codec="int8"
    )
    assert in_node == TracedHop(
        "in-node", "all_gather", 4, 60, 0, chunks=2, encoded=0, decoded=80, codec="int8"
    )
    first, second = ShardGroup(2, 4).hops_of(
        sent(
            "reduce_scatter",
            ("in-node", "int8", {"encode": 40, "recode_from": 40}),
            ("across", "int4", {"recode_to": 10, "decode_sum": 10}),
        ),
        8,
    )
    assert (first.pattern, first.encoded, first.decoded, first.codec) == ("all_to_all", 80, 80, "int8")
    assert (second.pattern, second.encoded, second.decoded, second.codec) == ("all_to_all", 20, 20, "int4")


@pytest.mark.parametrize(
    ("group", "hop", "codec", "ranks", "expected"),
    [
        (ShardGroup(2, 4), "flat", "none", 8, ("flat", "reduce_scatter", 8)),
        (ShardGroup(2, 4), "flat", "bf16", 8, ("flat", "reduce_scatter", 8)),
        (ShardGroup(2, 4), "flat", "int8", 8, ("flat", "all_to_all", 8)),
        (ShardGroup(1, 4), "flat", "none", 4, ("in-node", "reduce_scatter", 4)),
        (ShardGroup(4, 1), "flat", "none", 4, ("across", "reduce_scatter", 4)),
    ],
)
def test_links_and_patterns_of_a_flat_route(
    group: ShardGroup, hop: str, codec: str, ranks: int, expected: tuple[str, str, int]
) -> None:
    (found,) = group.hops_of(sent("reduce_scatter", (hop, codec, {"encode": 1})), ranks)
    assert (found.level, found.pattern, found.ranks) == expected


def test_a_gather_after_resharding_in_the_node_stays_there() -> None:
    (found,) = ShardGroup(2, 4).hops_of(sent("all_gather", ("post-forward", "none", {})), 4)
    assert (found.level, found.ranks, found.codec, found.encoded) == ("in-node", 4, "none", 0)


def test_an_all_reduce_sends_each_piece_twice() -> None:
    hop = all_reduce_hop(10, itemsize=4, ranks=4)
    assert (hop.pattern, hop.wire_bytes, hop.across_bytes) == ("all_reduce", 2 * 3 * 3 * 4, 2 * 3 * 3 * 4)
