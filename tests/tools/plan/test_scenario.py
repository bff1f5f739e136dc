from __future__ import annotations

from typing import Any

import pytest

from zeropp.tools.plan.models import PlanError, resolve
from zeropp.tools.plan.scenario import Scenario


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nodes": 0}, "nodes is 0; expected a positive number"),
        ({"sequence": -1}, "sequence is -1; expected a positive number"),
        ({"compute": "int8"}, "compute is 'int8'; expected one of fp32, bf16, fp16"),
        ({"nodes": 1, "ranks_per_node": 1}, "nodes x ranks_per_node is 1; expected two or more"),
    ],
)
def test_invalid_values_raise_an_error_with_the_expected_ones(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as raised:
        Scenario(**{"model": resolve("tiny"), "nodes": 2, "ranks_per_node": 2, **wrong})
    assert message in str(raised.value)


def test_tokens_are_per_rank_and_step() -> None:
    scenario = Scenario(resolve("tiny"), 2, 4, micro_batch=3, sequence=10, micro_batches=5)
    assert (scenario.world_size, scenario.tokens) == (8, 150)
