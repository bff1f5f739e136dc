from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from tests.ranks import Ranks
from tests.tools.doctor.check_job import Fault, run
from zeropp import ZeroPP
from zeropp.comm import reduce_scatter
from zeropp.comm.node_shard import NodeShard
from zeropp.quant.cpu import launch as cpu
from zeropp.quant.formats import BlockFormat
from zeropp.tools.doctor import training
from zeropp.tools.doctor.training import checks

EVERYONE = (0, 1, 2, 3)


def two_steps() -> AbstractContextManager[object]:
    """No fault: trainings of half the length."""
    return patch.object(training, "STEPS", 2)


def test_all_presets_train_correctly(ranks: Ranks) -> None:
    found, *_ = run(ranks, checks, two_steps, EVERYONE)
    assert {name: result.saw for name, result in found.items() if result.state != "ok"} == {}
    assert len(found) == 9
    assert found["Config.off() is plain FSDP2"].saw == "losses and weights are equal bit for bit"
    assert found["the node shard changes nothing"].saw == "losses and weights are equal bit for bit"


def test_one_node_skips_the_checks_that_need_two(ranks: Ranks) -> None:
    names = ("the node shard changes nothing", "changed weights are noticed", "Config() trains")
    found, *_ = run(ranks, checks, node_size=2, names=names, world=2)
    assert [found[name].state for name in names] == ["not run", "not run", "ok"]


def swallows_nan() -> AbstractContextManager[object]:
    right = cpu.encode

    def wrong(fmt: BlockFormat, source: Tensor, *rest: Any) -> None:
        right(fmt, source.nan_to_num(0.0), *rest)

    return patch.object(cpu, "encode", wrong)


def test_a_codec_that_swallows_nan_is_named(ranks: Ranks) -> None:
    found, *_ = run(ranks, checks, swallows_nan, (3,), names=("Config() trains",))
    assert found["Config() trains"].state == "fault"
    assert "that are NaN with plain FSDP2" in found["Config() trains"].saw


def sums_instead() -> AbstractContextManager[object]:
    return patch.object(reduce_scatter, "scale_of", lambda op, world_size: 1.0)


def test_a_sum_that_should_be_a_mean_is_named(ranks: Ranks) -> None:
    found, *_ = run(ranks, checks, sums_instead, EVERYONE, names=("Config() trains",))
    assert found["Config() trains"].state == "fault"
    assert "gradients have a relative error of 3" in found["Config() trains"].saw


def leaks() -> AbstractContextManager[object]:
    """`remove()` leaks node shards."""
    right = ZeroPP.remove
    kept: list[NodeShard] = []

    def wrong(zpp: ZeroPP) -> None:
        pairs = [comms.pair for comms in zpp.unit_comms if comms.pair is not None]
        kept.extend(shard for all_gather, _ in pairs for shard in all_gather.node_shards)
        right(zpp)

    return patch.object(ZeroPP, "remove", wrong)


def test_memory_that_remains_after_remove_is_counted(ranks: Ranks) -> None:
    name = "remove() gives all memory back"
    found, *_ = run(ranks, checks, leaks, EVERYONE, names=(name,))
    assert found[name].state == "fault"
    assert "bytes remain after remove()" in found[name].saw


def looks_away() -> AbstractContextManager[object]:
    return patch.object(NodeShard, "check", lambda node_shard, shard, alarm: None)


def is_blind() -> AbstractContextManager[object]:
    faults = ExitStack()
    faults.enter_context(looks_away())
    faults.enter_context(patch.object(NodeShard, "_notice_operations", lambda node_shard: None))
    return faults


@pytest.mark.parametrize(
    ("fault", "message"),
    [(looks_away, "through .data raise no error"), (is_blind, "in place are not sent again")],
)
def test_changed_weights_that_are_not_detected_are_named(ranks: Ranks, fault: Fault, message: str) -> None:
    name = "changed weights are noticed"
    found, *_ = run(ranks, checks, fault, EVERYONE, names=(name,))
    assert found[name].state == "fault"
    assert message in found[name].saw
