from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.ranks import Ranks
from tests.tools.plan.real import Case
from zeropp.tools.bench.workload import Workload
from zeropp.tools.plan.fake_step import record_step
from zeropp.tools.plan.models import PlanError
from zeropp.tools.strategies import find_strategy

TINY = Case(find_strategy("default"), Workload(layers=5, width=64, context=8, batch=1), micro_batches=2)


def test_it_records_the_given_number_of_layers(caplog: pytest.LogCaptureFixture) -> None:
    recording = record_step(TINY.scenario(), TINY.strategy, layers=3)
    units = {event.unit for part in recording.parts for event, _ in part}
    assert units == {"(root)", "blocks.0", "blocks.1", "blocks.2"}
    assert (recording.layers_name, recording.layer_count, recording.layers_are_alike) == ("blocks", 5, True)
    assert len(recording.parts) == 3  # two micro-batches and the optimizer
    assert not dist.is_initialized()
    assert caplog.text == ""  # zeropp's warnings about memory are disabled


def test_every_step_after_the_first_is_the_same() -> None:
    first, second = (record_step(TINY.scenario(), TINY.strategy, layers=2) for _ in range(2))
    assert first == second


def _record_on_real_ranks() -> str:
    with pytest.raises(PlanError) as raised:
        record_step(TINY.scenario(), TINY.strategy)
    return str(raised.value)


def test_a_process_that_is_a_rank_is_refused(ranks: Ranks) -> None:
    (message,) = ranks.run(_record_on_real_ranks, world=1)
    assert "a dry run creates a process group, and this process already has one" in message


def test_other_engines_are_refused() -> None:
    with pytest.raises(PlanError, match="strategy 'deepspeed' runs deepspeed"):
        record_step(TINY.scenario(), find_strategy("deepspeed"))
