from __future__ import annotations

from collections import Counter

import pytest

from tests.tools.plan.samples import build_shallow
from zeropp.tools.plan import recommend as recommending
from zeropp.tools.plan.catalog import find_hardware
from zeropp.tools.plan.hardware import Hardware
from zeropp.tools.plan.models import Model, resolve
from zeropp.tools.plan.planning import make_plan
from zeropp.tools.plan.recommend import find_compared, sensible_strategies
from zeropp.tools.plan.scenario import Scenario
from zeropp.tools.plan.timeline import Timeline, simulate
from zeropp.tools.plan.trace import Trace

SCENARIO = Scenario(resolve("tiny"), 2, 2, sequence=32)
SHALLOW = Scenario(Model("shallow", build_shallow), 2, 2, sequence=32)
SLOW = find_hardware("a100-100g").changed(link_gbit_s=1.0)


def test_advice_compares_all_strategies_and_simulates_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: Counter[int] = Counter()

    def counted(trace: Trace, hardware: Hardware) -> Timeline:
        simulated[id(trace)] += hardware is SLOW
        return simulate(trace, hardware)

    monkeypatch.setattr(recommending, "simulate", counted)
    dry_runs: list[str] = []
    plan = make_plan(SHALLOW, SLOW, find_compared("fsdp2"), advise=True, on_progress=dry_runs.append)
    strategies = sensible_strategies(2, 2, 1)
    assert {planned.strategy for planned in plan.strategies} == set(strategies)
    assert [simulated[id(planned.timeline.trace)] for planned in plan.strategies] == [1] * len(strategies)
    best, plain = plan.strategies[0], find_compared("fsdp2")
    assert plan.sentences[0].startswith(f"Use {best.strategy.title}")
    # Each strategy has one dry run. Only the best and plain FSDP2 have more, of larger micro-batches.
    expected = Counter(strategy.title for strategy in strategies)
    again = Counter(title.removeprefix("dry run: ").rsplit(",", 1)[0] for title in dry_runs) - expected
    assert set(again) == {best.strategy.title, plain.title}


def test_without_advice_a_plan_has_the_named_strategy_and_plain_fsdp2() -> None:
    plan = make_plan(SCENARIO, SLOW, find_compared("hsdp"))
    assert [planned.strategy.name for planned in plan.strategies] == ["hsdp", "fsdp2"]
    assert plan.sentences == ()
    assert plan.points == ()
    assert plan.subject == (
        "tiny (1.87M parameters), 2 nodes x 2 ranks, 1 x 1 x 32 tokens per rank and step, bf16"
    )
