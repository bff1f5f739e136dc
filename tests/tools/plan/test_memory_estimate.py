from __future__ import annotations

import pytest
import torch

from tests.ranks import Ranks
from tests.tools.plan.real import Case, communication_bytes, peak_of_second_step
from zeropp.tools.bench.workload import Workload
from zeropp.tools.plan.catalog import find_hardware
from zeropp.tools.plan.dry_run import dry_run
from zeropp.tools.plan.memory_estimate import LiveStorages, MemoryEstimate, nbytes_of
from zeropp.tools.strategies import find_strategy

WIDE = Workload(layers=5, width=320, context=32, batch=1)
LONG = Workload(layers=5, width=128, context=192, batch=4)


@pytest.mark.parametrize(
    "case",
    [
        Case(find_strategy("default"), WIDE, micro_batches=2),
        Case(find_strategy("default"), LONG),
        Case(find_strategy("default"), LONG, checkpointing=True),
        Case(find_strategy("wire16-accumulate"), WIDE, micro_batches=2),
    ],
    ids=["weights", "activations", "checkpointing", "unsharded gradients"],
)
def test_peak_is_that_of_a_real_run(ranks: Ranks, case: Case) -> None:
    estimate = dry_run(case.scenario(), case.strategy).memory
    measured = max(ranks.run(peak_of_second_step, case))
    assert estimate.peak == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("name", ["default", "wire16-accumulate"])
def test_communication_threads_add_the_memory_of_two_jobs(ranks: Ranks, name: str) -> None:
    """Hardware with streams has no such threads, and nothing is added."""
    case = Case(find_strategy(name), WIDE)
    trace = dry_run(case.scenario(), case.strategy)
    with_streams = find_hardware("a100-100g")
    assert with_streams.memory_of(trace) == trace.memory
    memory = with_streams.changed(overlap=False).memory_of(trace)
    estimate = memory.communication + memory.node_shards
    full = nbytes_of(WIDE.build_model().blocks[0].parameters())
    on_the_way = 3 * full // 4  # two reductions at work and one that waits, on one of four ranks
    for after, most in ranks.run(communication_bytes, case):
        assert after <= estimate - on_the_way < 1.15 * after  # some buffers are not needed twice
        assert after <= most <= estimate + full  # which are activations in the estimate
    assert trace.memory.communication + trace.memory.node_shards < 0.8 * estimate


def test_storages_count_once_and_while_they_live() -> None:
    live = LiveStorages()
    x = torch.zeros(100)
    for tensor in (x, x[:50], x.view(10, 10)):
        live.add(tensor)
    assert live.nbytes == 400
    view = x[:1]
    del x, tensor
    assert live.nbytes == 400  # the view refers to it
    del view
    assert live.nbytes == 0


def test_resized_storages_count_by_their_size_at_the_moment() -> None:
    live = LiveStorages()
    weights = torch.zeros(100)
    live.add(weights)
    live.add_resized([weights])
    assert (live.nbytes, live.resized_bytes) == (400, 400)
    weights.untyped_storage().resize_(0)
    assert live.nbytes == 0
    weights.untyped_storage().resize_(400)
    live.add(weights)
    assert live.nbytes == 400
    del weights
    assert live.nbytes == 0


def test_shared_storages_count_once() -> None:
    x = torch.zeros(10)
    assert nbytes_of([x, x[:5], torch.zeros(3)]) == 52


def test_growth_is_linear() -> None:
    small, larger = MemoryEstimate(1, 2, 3, 4, 5, 6, 7), MemoryEstimate(2, 2, 5, 4, 5, 6, 17)
    assert small.extrapolate(larger, 3) == MemoryEstimate(4, 2, 9, 4, 5, 6, 37)
