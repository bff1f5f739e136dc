"""Export of a timeline for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..atomic_files import write_file
from .timeline import Timeline

TRACKS = ("compute", "gather", "gather 2", "reduce", "reduce 2", "all-reduce", "in-node link", "across link")
"""Resources of a timeline, in the order in which viewers show them."""


def chrome_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Return events of the trace format: one track per resource, times in microseconds."""
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": track}}
        for number, track in enumerate(TRACKS)
    ]
    return names + [
        {
            "ph": "X",
            "name": op.name,
            "cat": op.kind,
            "pid": 0,
            "tid": TRACKS.index(resource),
            "ts": op.start * 1e6,
            "dur": op.seconds * 1e6,
            "args": {"phase": op.phase, "beside": op.is_slowdown},
        }
        for op in timeline.ops
        for resource in op.resources
        if op.kind != "wait"
    ]


def write_chrome_trace(timeline: Timeline, path: Path) -> None:
    write_file(path, json.dumps({"traceEvents": chrome_events(timeline), "displayTimeUnit": "ms"}))
