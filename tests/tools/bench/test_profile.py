from __future__ import annotations

from types import SimpleNamespace

import pytest

from zeropp.comm.profiler_labels import Label
from zeropp.tools.bench.profile import PARTS, part_of, split_step


def event(name: str, start_us: float, end_us: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start_us, end=end_us))


def test_every_label_of_zeropp_has_a_part() -> None:
    labels = {
        str(Label("all_gather", "encode", "a")): "encode",
        str(Label("all_gather", "across", "a")): "weights across",
        str(Label("all_gather", "in-node", "a")): "weights in-node",
        str(Label("all_gather", "flat", "a")): "weights flat",
        str(Label("all_gather", "decode", "a")): "decode",
        str(Label("reduce_scatter", "encode", "a")): "encode",
        str(Label("reduce_scatter", "in-node", "a")): "gradients in-node",
        str(Label("reduce_scatter", "recode", "a")): "recode",
        str(Label("reduce_scatter", "across", "a")): "gradients across",
        str(Label("reduce_scatter", "flat", "a")): "gradients flat",
        str(Label("reduce_scatter", "decode", "a")): "decode",
        str(Label("reduce_scatter", "wait", "a")): "wait",
    }
    assert {label: part_of(label) for label in labels} == labels
    assert set(labels.values()) <= set(PARTS)
    assert part_of("aten::mm") is None


def test_parts_of_a_step_add_up() -> None:
    profiler = SimpleNamespace(
        events=lambda: [
            event(str(Label("all_gather", "encode", "a")), 0, 1000),
            event(str(Label("all_gather", "across", "a")), 1000, 4000),
            event("gloo:all_gather", 1100, 3900),  # inside our label, so it counts once
            event("aten::mm", 4000, 6000),
            event("gloo:all_reduce", 6000, 8000),
            event("gloo:all_reduce", 7000, 9000),  # overlaps, so the common part counts once
        ]
    )
    parts = split_step(profiler, step_ms=10.0)
    assert {name: value for name, value in parts.items() if value} == pytest.approx(
        {"encode": 1.0, "weights across": 3.0, "other collectives": 3.0, "compute": 3.0}
    )


def test_hops_that_overlap_compute_take_only_the_wait() -> None:
    profiler = SimpleNamespace(
        events=lambda: [
            event(str(Label("all_gather", "across", "a")), 0, 6000),  # in a communication thread
            event("aten::mm", 0, 5000),
            event(str(Label("all_gather", "wait", "a")), 5000, 6000),
            event("aten::mm", 6000, 8000),
        ]
    )
    parts = split_step(profiler, step_ms=8.0)
    assert {name: value for name, value in parts.items() if value} == pytest.approx(
        {"weights across": 6.0, "wait": 1.0, "compute": 7.0}
    )
