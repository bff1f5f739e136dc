"""Code of strategies: it must do what the strategy does."""

from __future__ import annotations

import pytest

import zeropp
from zeropp.tools.plan.recommend import COMPARED
from zeropp.tools.plan.snippet import config_code, snippet
from zeropp.tools.strategies import STRATEGIES, Strategy

CONFIGS = [strategy.config for strategy in STRATEGIES if strategy.config is not None]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_code_of_a_config_makes_it(config: zeropp.Config) -> None:
    assert eval(f"zeropp.{config_code(config)}", {"zeropp": zeropp}) == config


@pytest.mark.parametrize("strategy", COMPARED, ids=lambda strategy: strategy.name)
def test_every_strategy_of_a_plan_has_its_lines(strategy: Strategy) -> None:
    code = snippet(strategy)
    assert ("zeropp.apply(model, zeropp.Config" in code) == (strategy.config is not None)
    assert ("mesh=" in code) == strategy.is_hsdp
    assert ("reshard_after_forward" in code) == strategy.reshard_in_node
    assert ("is_last" in code) == (strategy.sync != "every")
