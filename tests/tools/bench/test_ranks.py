"""Failures of ranks raise an error in the caller: a failure of all ranks, and the end of one."""

from __future__ import annotations

import pytest

from zeropp import Config
from zeropp.tools.bench.ranks import Ranks, StrategyError
from zeropp.tools.bench.workload import Workload
from zeropp.tools.lab import Cluster, JobError
from zeropp.tools.strategies import Strategy, find_strategy

TINY = Workload(layers=1, width=64, batch=1)


def call_after_the_ranks_were_killed(cluster: Cluster) -> None:
    with Ranks(cluster) as ranks:
        with pytest.raises(StrategyError, match="node_size is 3, which does not divide the 2 ranks"):
            ranks.build(Strategy("bad", "", Config(node_size=3)), TINY)
        built = ranks.build(find_strategy("wire16"), TINY)  # the ranks still run
        assert built[0] == built[1]
        cluster._kill()
        ranks.take_steps(count=1, micro_batches=1)


def test_errors_of_strategies_and_the_end_of_ranks() -> None:
    with Cluster(nodes=2, ranks_per_node=1) as cluster, pytest.raises(JobError, match="ended in TakeSteps"):
        call_after_the_ranks_were_killed(cluster)
