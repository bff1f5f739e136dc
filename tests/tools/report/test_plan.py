from __future__ import annotations

import json
from pathlib import Path

from tests.tools.plan.samples import flat_trace, two_hop_trace
from zeropp.comm.ledger import render
from zeropp.tools.plan.catalog import find_hardware
from zeropp.tools.plan.recommend import rank, recommend
from zeropp.tools.plan.result import Plan
from zeropp.tools.plan.sweep import Axes, sweep
from zeropp.tools.report.plan import plan_tables
from zeropp.tools.strategies import find_strategy

A100 = find_hardware("a100-100g")
TRACES = {find_strategy("fsdp2"): flat_trace(), find_strategy("default"): two_hop_trace()}


def sample_plan() -> Plan:
    ranked, axes = rank(TRACES, A100), Axes.parse("link=100/400,nodes=2/4")
    points = sweep(axes, list(TRACES), A100, 2, lambda strategy, nodes: TRACES[strategy])
    return Plan("a model", A100, tuple(ranked), recommend(ranked, A100), tuple(points))


def test_tables_have_times_memory_and_the_sweep() -> None:
    text = "".join(render(table) for table in plan_tables(sample_plan()))
    best, plain = sample_plan().strategies
    assert f"{best.step_seconds * 1e3:,.1f}" in text
    assert f"{plain.step_seconds * 1e3:,.1f}" in text
    assert "across link" in text
    assert "6.00" in text  # GiB, of all parts of the memory together
    assert "400 Gbit/s" in text
    assert "tokens/s, 4 nodes" in text


def test_the_numbers_as_json(tmp_path: Path) -> None:
    sample_plan().save(tmp_path / "plan.json")
    numbers = json.loads((tmp_path / "plan.json").read_text())
    assert [option["strategy"] for option in numbers["options"]] == ["default", "fsdp2"]
    assert numbers["options"][1]["across_bytes"] == 12 * (1 << 26) // 8
    assert numbers["hardware"]["link_gbit_s"] == 100.0
    assert len(numbers["sweep"]) == 8
