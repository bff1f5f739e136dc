from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.plan.samples import two_hop_trace
from zeropp.tools.plan.catalog import find_hardware
from zeropp.tools.plan.chrome import TRACKS, write_chrome_trace
from zeropp.tools.plan.timeline import simulate


def test_every_operation_is_in_the_file_in_the_lane_of_its_resource(tmp_path: Path) -> None:
    timeline = simulate(two_hop_trace(), find_hardware("a100-100g"))
    write_chrome_trace(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    bars = [event for event in events if event["ph"] == "X"]
    assert tuple(lanes.values()) == TRACKS
    shown = sorted((lanes[bar["tid"]], bar["name"], bar["ts"]) for bar in bars)
    assert shown == sorted(
        (resource, op.name, op.start * 1e6)
        for op in timeline.ops
        for resource in op.resources
        if op.kind != "wait"
    )
    assert max(bar["ts"] + bar["dur"] for bar in bars) == pytest.approx(timeline.step_seconds * 1e6)
