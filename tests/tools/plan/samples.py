"""A shallow model, and synthetic traces of equal units with every kind of event of a dry run."""

from __future__ import annotations

from zeropp.tools.bench.workload import Workload
from zeropp.tools.models.gpt import GPT
from zeropp.tools.plan.memory_estimate import MemoryEstimate
from zeropp.tools.plan.trace import Compute, Event, Gather, Reduce, Trace, TracedHop

NODES, RANKS = 4, 8
MEMORY = MemoryEstimate(1 << 30, 2 << 30, 1 << 30, 0, 1 << 30, 0, 1 << 30)


def build_shallow() -> GPT:
    """Build a model with few layers, for quick dry runs."""
    return Workload(layers=2, width=64, context=64).build_model()


def hop(
    level: str, pattern: str, wire_bytes: int, *, chunks: int = 1, coded: int = 0, codec: str = "none"
) -> TracedHop:
    ranks = {"in-node": RANKS, "across": NODES}.get(level, NODES * RANKS)
    across = {"in-node": 0, "across": wire_bytes}.get(level, wire_bytes // RANKS)
    return TracedHop(level, pattern, ranks, wire_bytes, across, chunks, coded, coded, codec)  # type: ignore[arg-type]


def flat_trace(
    units: int = 4, wire_bytes: int = 1 << 26, flops: int = 10**11, micro_batches: int = 1
) -> Trace:
    """Return a trace of plain FSDP2."""
    return make_trace(
        units,
        flops,
        micro_batches,
        first=(hop("flat", "all_gather", wire_bytes),),
        again=(hop("flat", "all_gather", wire_bytes),),
        reduce=(hop("flat", "reduce_scatter", wire_bytes),),
    )


def two_hop_trace(
    units: int = 4, numel: int = 1 << 25, flops: int = 10**11, micro_batches: int = 1, chunks: int = 4
) -> Trace:
    """Return a trace of zeropp's default: int8 weights across nodes once, int8 and int4 gradients."""
    in_node = hop("in-node", "all_gather", numel, chunks=chunks, coded=numel, codec="int8")
    return make_trace(
        units,
        flops,
        micro_batches,
        first=(hop("across", "all_gather", numel // RANKS, chunks=chunks, coded=0, codec="int8"), in_node),
        again=(in_node,),
        reduce=(
            hop("in-node", "all_to_all", numel, chunks=chunks, coded=numel, codec="int8"),
            hop(
                "across", "all_to_all", numel // RANKS // 2, chunks=chunks, coded=numel // RANKS, codec="int4"
            ),
        ),
    )


def make_trace(
    units: int,
    flops: int,
    micro_batches: int,
    first: tuple[TracedHop, ...],
    again: tuple[TracedHop, ...],
    reduce: tuple[TracedHop, ...],
) -> Trace:
    """Return forward, backward with prefetch, reductions and the optimizer, in FSDP2's order."""
    events: list[Event] = []
    names = [f"blocks.{number}" for number in range(units)]
    for micro_batch in range(micro_batches):
        for name in names:
            events += [Gather(name, again if micro_batch else first), Compute(name, "forward", flops, 0)]
        events.append(Gather(names[-1], again))
        for name, following in zip(names[::-1], [*names[-2::-1], None], strict=True):
            events += [] if following is None else [Gather(following, again)]
            events += [Compute(name, "backward", 2 * flops, 0), Reduce(name, reduce)]
    events.append(Compute("", "optimizer", 0, 1 << 20))
    return Trace(tuple(events), 10**9, NODES, RANKS, micro_batches, 2048, MEMORY)
