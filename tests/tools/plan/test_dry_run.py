from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from torch import nn

from tests.ranks import Ranks
from tests.tools.plan.real import Case, ledger_of_second_step
from zeropp.config import Config
from zeropp.quant.formats import BlockFormat
from zeropp.tools.bench.workload import Workload
from zeropp.tools.plan.catalog import find_hardware
from zeropp.tools.plan.dry_run import dry_run
from zeropp.tools.plan.models import Model, resolve
from zeropp.tools.plan.scenario import Scenario
from zeropp.tools.plan.timeline import simulate
from zeropp.tools.plan.trace import Compute, Gather, Reduce, Trace
from zeropp.tools.strategies import Strategy, find_strategy

SMALL = Workload(layers=2, width=128, context=16, batch=1)
CHUNKED = Workload(layers=2, width=320, context=16, batch=1)
DEEP = Workload(layers=5, width=64, context=16, batch=2)
OFF = Strategy("off", "plain FSDP2, counted", Config.off())
HSDP = replace(find_strategy("hsdp"), config=Config.off())


def in_two_pieces(name: str) -> Strategy:
    """Return the strategy with two chunks. A trace has chunks as on a GPU; real runs on gloo would not cut
    these units (comm/chunks.py)."""
    strategy = find_strategy(name)
    assert strategy.config is not None
    return replace(strategy, config=replace(strategy.config, chunks=2))


CASES = {
    "default": Case(in_two_pieces("default"), CHUNKED),
    "default, accumulating": Case(find_strategy("default"), SMALL, micro_batches=4),
    "default, checkpointing": Case(find_strategy("default"), SMALL, micro_batches=2, checkpointing=True),
    "default, 5 layers": Case(find_strategy("default"), replace(SMALL, layers=5)),
    "paper": Case(find_strategy("paper"), SMALL, micro_batches=2),
    "off": Case(OFF, SMALL, micro_batches=2),
    "four bits": Case(in_two_pieces("four-bit"), CHUNKED, micro_batches=2),
    "wire16": Case(find_strategy("wire16"), CHUNKED),
    "wire16, accumulating": Case(find_strategy("wire16-accumulate"), SMALL, micro_batches=3),
    "hpz": Case(find_strategy("hpz"), SMALL, micro_batches=2),
    "qgz": Case(find_strategy("qgz"), SMALL),
    "reshard": Case(find_strategy("wire16-reshard"), SMALL),
    "hsdp": Case(HSDP, SMALL, micro_batches=2),
}


def _bytes_of(trace: Trace) -> dict[tuple[str, str, str], tuple[int, int, int]]:
    """Return calls, wire bytes and bytes across, by unit, collective and level, as the ledger has them."""
    calls: Counter[tuple[str, str, str]] = Counter()
    wire, across = calls.copy(), calls.copy()
    for event in trace.events:
        if isinstance(event, Compute):
            continue
        for hop in event.hops:
            if hop.pattern == "all_reduce":
                continue  # runs in FSDP2, and is not in the ledger
            key = (event.unit, "all_gather" if isinstance(event, Gather) else "reduce_scatter", hop.level)
            calls[key] += hop.chunks
            wire[key] += hop.wire_bytes
            across[key] += hop.across_bytes
    return {key: (calls[key], wire[key], across[key]) for key in calls}


def _by_level(
    ledger: dict[tuple[str, str, str], tuple[int, int, int]], is_in_node: bool
) -> dict[tuple[str, str, str], tuple[int, int, int]]:
    levels = {"flat": "in-node" if is_in_node else "flat", "post-forward": "in-node"}
    return {(unit, kind, levels.get(hop, hop)): counted for (unit, kind, hop), counted in ledger.items()}


ON_THREE_NODES = ("default", "wire16", "hpz", "hsdp")
"""One case per route: two hops, flat, two hops for weights only, replicas."""


@pytest.mark.parametrize(
    ("name", "nodes"), [*((name, 2) for name in CASES), *((name, 3) for name in ON_THREE_NODES)]
)
def test_bytes_are_those_of_a_real_run(ranks: Ranks, name: str, nodes: int) -> None:
    """Every row of the ledger of every rank has exactly the bytes of the trace."""
    case = replace(CASES[name], nodes=nodes)
    trace = dry_run(case.scenario(), case.strategy)
    traced = _bytes_of(trace)
    assert traced
    assert simulate(trace, find_hardware("a100-100g")).step_seconds > 0  # every hop has a cost
    for ledger in ranks.run(ledger_of_second_step, case, world=2 * nodes):
        assert traced == _by_level(ledger, is_in_node=case.strategy.is_hsdp)


@pytest.mark.parametrize("name", ["default", "wire16-accumulate", "hsdp"])
def test_multiplied_layers_equal_a_full_run(name: str) -> None:
    """Events and memory are equal, with recomputation and more micro-batches than are recorded."""
    case = Case(find_strategy(name), DEEP, nodes=3, micro_batches=4, checkpointing=True)
    multiplied, full = (dry_run(case.scenario(), case.strategy, full=full) for full in (False, True))
    assert multiplied == full
    assert {event.unit for event in full.events} == {"(root)", *(f"blocks.{i}" for i in range(5))}


def test_layers_that_differ_are_all_run(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> nn.Module:
        model = DEEP.build_model()
        model.blocks[3].down = nn.Linear(256, 64)  # with a bias
        return model

    scenario = Scenario(Model("uneven", build), 2, 2, sequence=DEEP.context)
    trace = dry_run(scenario, find_strategy("default"))
    assert trace == dry_run(scenario, find_strategy("default"), full=True)
    assert "the layers of uneven differ" in caplog.text


def test_a_world_of_256_ranks() -> None:
    """Weights cross nodes once in int8, gradients once in int4."""
    trace = dry_run(Scenario(resolve("125M"), 32, 8, micro_batches=2), find_strategy("default"))
    gathers = [event for event in trace.events if isinstance(event, Gather) and event.unit == "blocks.7"]
    reductions = [event for event in trace.events if isinstance(event, Reduce) and event.unit == "blocks.7"]
    width, hidden = 768, 2048
    # FSDP2 cuts along the first dimension: a rank has 3 of 768 rows of attention's four matrices, 8 of 2048
    # rows of the SwiGLU's first two, 3 of 768 (longer) rows of its last, and 3 elements of each of two norms.
    shard = 4 * 3 * width + 2 * 8 * width + 3 * hidden + 2 * 3
    # All but the norms fill whole blocks. The norms are sent uncompressed, in 32 bits.
    assert (shard - 6) % 128 == 0
    int8, int4 = (BlockFormat(bits, 128).row_bytes(shard - 6) + 32 for bits in (8, 4))
    assert [[(hop.level, hop.wire_bytes) for hop in event.hops] for event in gathers] == [
        [("across", 31 * int8), ("in-node", 7 * 32 * int8)],
        *[[("in-node", 7 * 32 * int8)]] * 3,
    ]
    assert [[(hop.level, hop.wire_bytes) for hop in event.hops] for event in reductions] == [
        [("in-node", 7 * 32 * int8)],
        [("in-node", 7 * 32 * int8), ("across", 31 * int4)],
    ]
    assert [(hop.encoded, hop.decoded) for hop in gathers[0].hops] == [(shard, 0), (0, 256 * shard)]
    assert [(hop.encoded, hop.decoded) for hop in reductions[1].hops] == [
        (256 * shard, 256 * shard),
        (32 * shard, 32 * shard),
    ]
    assert trace.parameters == 123_587_328


def test_flops_are_those_of_the_arithmetic() -> None:
    scenario = Case(OFF, DEEP, checkpointing=True).scenario()
    trace = dry_run(scenario, OFF)
    flops = Counter[tuple[str, str]]()
    for event in trace.events:
        if isinstance(event, Compute):
            flops[event.unit, event.phase] += event.flops
    batch, length, width = DEEP.batch, DEEP.context, DEEP.width
    matrices, attention = 2 * batch * length * 12 * width**2, 4 * batch * length**2 * width
    head = 2 * batch * length * width * 256
    assert flops["blocks.3", "forward"] == matrices + attention
    assert flops["blocks.3", "backward"] == 2 * matrices + 2.5 * attention  # q k^T is computed again
    # Recomputation ends when it has the last saved tensor, which is before the last matrix product.
    assert flops["blocks.3", "recompute"] == matrices + attention - 2 * batch * length * 4 * width**2
    assert flops["(root)", "forward"] == head
    assert flops["(root)", "backward"] == 2 * head
    assert trace.flops == sum(flops.values())


def test_order_is_that_of_fsdp2() -> None:
    """Forward gathers a unit before its compute. Backward starts the next gather before compute."""
    trace = dry_run(Case(OFF, SMALL).scenario(), OFF)
    order = [
        (type(event).__name__, event.unit)
        for event in trace.events
        if not (isinstance(event, Compute) and (event.flops == 0 or event.phase == "optimizer"))
    ]
    assert order == [
        ("Gather", "(root)"),
        ("Gather", "blocks.0"),
        ("Compute", "blocks.0"),
        ("Gather", "blocks.1"),
        ("Compute", "blocks.1"),
        ("Compute", "(root)"),
        ("Gather", "blocks.1"),
        ("Compute", "(root)"),
        ("Gather", "blocks.0"),
        ("Compute", "blocks.1"),
        ("Reduce", "blocks.1"),
        ("Compute", "blocks.0"),
        ("Reduce", "blocks.0"),
        ("Reduce", "(root)"),
    ]
