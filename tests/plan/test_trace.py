from __future__ import annotations

from zeropp.plan.memory_estimate import MemoryEstimate
from zeropp.plan.trace import Compute, Gather, Reduce, Trace, TracedHop

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
