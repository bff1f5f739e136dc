from __future__ import annotations

from types import SimpleNamespace

import pytest

from zeropp.lab.timeline import PARTS, part_of, split_step


def event(name: str, start_us: float, end_us: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start_us, end=end_us))


def test_every_label_of_zeropp_has_a_part() -> None:
    labels = {
        "zeropp::all_gather.encode (a)": "encode",
        "zeropp::all_gather.across (a)": "weights across",
        "zeropp::all_gather.in-node (a)": "weights in-node",
        "zeropp::all_gather.flat (a)": "weights flat",
        "zeropp::all_gather.decode (a)": "decode",
        "zeropp::reduce_scatter.encode (a)": "encode",
        "zeropp::reduce_scatter.in-node (a)": "gradients in-node",
        "zeropp::reduce_scatter.recode (a)": "recode",
        "zeropp::reduce_scatter.across (a)": "gradients across",
        "zeropp::reduce_scatter.flat (a)": "gradients flat",
        "zeropp::reduce_scatter.decode (a)": "decode",
    }
    assert {label: part_of(label) for label in labels} == labels
    assert set(labels.values()) <= set(PARTS)
    assert part_of("aten::mm") is None


def test_parts_of_a_step_add_up() -> None:
    profiler = SimpleNamespace(
        events=lambda: [
            event("zeropp::all_gather.encode (a)", 0, 1000),
            event("zeropp::all_gather.across (a)", 1000, 4000),
            event("gloo:all_gather", 1100, 3900),  # is inside our label: counted once
            event("aten::mm", 4000, 6000),
            event("gloo:all_reduce", 6000, 8000),
            event("gloo:all_reduce", 7000, 9000),  # overlaps: waited for once
        ]
    )
    parts = split_step(profiler, step_ms=10.0)
    assert {name: value for name, value in parts.items() if value} == pytest.approx(
        {"encode": 1.0, "weights across": 3.0, "other collectives": 3.0, "compute": 3.0}
    )
