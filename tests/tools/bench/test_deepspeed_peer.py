"""DeepSpeed's strategies do the same work as FSDP2's. Needs DeepSpeed, whose setup is in docs/lab.md."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import pytest

from zeropp.tools.bench.messages import Steps
from zeropp.tools.bench.ranks import Ranks
from zeropp.tools.bench.workload import Workload
from zeropp.tools.lab import Cluster
from zeropp.tools.strategies import find_strategy

SMALL = Workload(layers=2, width=256, batch=2)
STEPS = 5


class StrategyRun(NamedTuple):
    parameters: int
    ranks: list[Steps]
    """Steps of each rank after the first step."""


@pytest.fixture(scope="module")
def runs() -> dict[str, StrategyRun]:
    """Runs by name of the strategy."""
    if find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install 'zeropp[deepspeed]'")
    found = {}
    with Cluster(nodes=2, ranks_per_node=2) as cluster, Ranks(cluster) as ranks:
        for strategy in ("fsdp2", "deepspeed", "deepspeed-hpz"):
            built = ranks.build(find_strategy(strategy), SMALL)
            ranks.take_steps(count=1, micro_batches=1)  # DeepSpeed's setup sends additional bytes
            found[strategy] = StrategyRun(built[0].parameters, ranks.take_steps(STEPS, micro_batches=1))
    return found


@pytest.mark.parametrize("strategy", ["deepspeed", "deepspeed-hpz"])
def test_losses_are_those_of_fsdp2(runs: dict[str, StrategyRun], strategy: str) -> None:
    """Losses would differ with clipped gradients."""
    for deepspeed, fsdp2 in zip(runs[strategy].ranks, runs["fsdp2"].ranks, strict=True):
        assert deepspeed.losses == pytest.approx(fsdp2.losses, abs=5e-6)
        assert deepspeed.losses[-1] < deepspeed.losses[0]


def test_layers_are_resharded_and_hpz_saves_the_gather_of_backward(
    runs: dict[str, StrategyRun],
) -> None:
    """In fp32 on gloo, a node sends 3 bytes per parameter in each of two gathers, and 6 in a reduction."""
    sent = {strategy: run.ranks[0].tx_bytes / run.parameters / STEPS for strategy, run in runs.items()}
    assert sent["fsdp2"] == pytest.approx(12, rel=0.05)
    assert sent["deepspeed"] == pytest.approx(12, rel=0.05)
    assert sent["deepspeed-hpz"] == pytest.approx(9, rel=0.05)
