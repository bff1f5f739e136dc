from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from tests.ranks import HANG_SECONDS, Ranks
from zeropp.tools.doctor import speed
from zeropp.tools.doctor.check import DoctorSettings, Session, StepTime, run_checks
from zeropp.tools.doctor.hardware import Size
from zeropp.tools.doctor.speed import advise
from zeropp.tools.plan.catalog import find_hardware
from zeropp.tools.plan.hardware import Cost
from zeropp.tools.strategies import COMPUTE

PRESETS = ("Config.off()", "Config.wire16()", "Config.paper()", "Config()", "Config.four_bit()")


def measured() -> dict[str, Any]:
    """Run the speed part, as small as possible."""
    settings = DoctorSettings(2, "tiny", micro_batch=1, micro_batches=2, sequence=8, rounds=1)
    session = Session.begin(settings, HANG_SECONDS)
    with (
        patch.object(speed, "Size", partial(Size, wire_bytes=(1 << 12, 1 << 14), repeats=1)),
        patch.dict(speed.WIDTHS, cpu=64),
        patch.multiple(speed, WARM_UP=1, STEPS=1),
    ):
        results = run_checks(speed.checks(), session)
    return {"results": results, "steps": session.steps, "advice": session.advice}


def test_every_way_to_train_is_measured_and_counted(ranks: Ranks) -> None:
    first, *others = ranks.run(measured)
    assert [result.state for result in first["results"]] == ["ok", "ok"]
    assert all(other["steps"] == first["steps"] for other in others)
    assert all(other["advice"] == first["advice"] for other in others)
    steps = {step.name: step for step in first["steps"]}
    plain = ("FSDP2 as it comes", "FSDP2, set_requires_gradient_sync")
    assert list(steps) == [*plain, *PRESETS, COMPUTE.title]
    assert all(step.milliseconds > 0 for step in steps.values())
    assert steps[plain[0]].speedup == 1.0
    # Bytes of a node. Only gradients wait for the last micro-batch; a flat route has no node shard.
    parameters = 1_866_624
    assert steps[plain[1]].across_bytes == steps["Config.off()"].across_bytes
    assert 0 < steps["Config.four_bit()"].across_bytes < steps["Config()"].across_bytes < 1.0 * parameters
    assert steps["Config.off()"].across_bytes > 8 * parameters
    assert steps[plain[0]].across_bytes is None
    assert all(0 <= step.hidden <= 1 for step in steps.values() if step.hidden is not None)
    assert "1 turns of 8 strategies" in first["results"][1].saw
    assert "to others, one rank alone" in first["results"][0].saw


def test_costs_of_the_ledgers_rows() -> None:
    names = ("all_gather in-node", "all_gather in-node plain", "all_to_all in-node", "reduce_scatter in-node")
    costs = {name: Cost(float(place), 1.0) for place, name in enumerate(names)}
    one_node = replace(find_hardware("a100-100g"), measured=costs)
    for collective, hop, is_plain, expected in (
        ("all_gather", "in-node", False, "all_gather in-node"),
        ("all_gather", "flat", False, "all_gather in-node"),
        ("all_gather", "flat", True, "all_gather in-node plain"),
        ("reduce_scatter", "in-node", False, "all_to_all in-node"),
        ("reduce_scatter", "flat", True, "reduce_scatter in-node"),
    ):
        assert speed._cost_of(one_node, collective, hop, is_plain) == costs[expected]
    assert speed._cost_of(replace(one_node, measured={}), "all_gather", "flat", True) is None


def steps_of(**milliseconds: float) -> list[StepTime]:
    """Return made-up times of plain FSDP2, compute alone and presets. The default is 1000 ms."""
    names = {
        "plain": "FSDP2 as it comes",
        "compute": COMPUTE.title,
        "off": "Config.off()",
        "default": "Config()",
    }
    names |= {name: f"Config.{name}()" for name in ("wire16", "paper", "four_bit")}
    bytes_across = {"plain": 80.0, "off": 80.0, "default": 8.0}
    times = {name: milliseconds.get(name, 1000.0) for name in names}
    return [
        StepTime(names[name], time, times["plain"] / time, bytes_across.get(name, 4.0), None)
        for name, time in times.items()
    ]


def test_advice_names_the_fastest_how_much_and_why() -> None:
    (sentence,) = advise(steps_of(plain=100, off=102, compute=40, default=50, four_bit=80))
    assert "Use zeropp.Config(), 2.00x as fast as plain FSDP2 (median steps 50 ms and 100 ms)" in sentence
    assert "60% of plain FSDP2's step is not compute" in sentence
    assert "zeropp sends 10% of its cross-node bytes" in sentence
    assert "differ by 2%" in sentence


def test_an_equally_fast_preset_does_not_replace_the_default() -> None:
    (sentence,) = advise(steps_of(plain=100, off=100, compute=40, default=50, four_bit=49, paper=49.5))
    assert "Use zeropp.Config()," in sentence
    (sentence,) = advise(steps_of(plain=100, off=100, compute=40, default=50, four_bit=45))
    assert "Use zeropp.Config.four_bit()," in sentence


def test_plain_fsdp2_is_recommended_if_zeropp_is_not_faster() -> None:
    (sentence,) = advise(steps_of(plain=100, off=100, compute=95, default=98))
    assert "Use plain FSDP2: zeropp.Config() is 1.02x as fast" in sentence


def test_noise_is_not_a_speedup() -> None:
    """Plain FSDP2 takes 100 ms and 120 ms, so 90 ms is not faster."""
    (sentence,) = advise(steps_of(plain=100, off=120, compute=80, default=90))
    assert "Use plain FSDP2" in sentence
    (sentence,) = advise(steps_of(plain=100, off=104, compute=80, default=90))
    assert "Use zeropp.Config()," in sentence
