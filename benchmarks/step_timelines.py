"""Profiles of one step of FSDP2 with a 16-bit wire and one of zeropp, with their bytes.

    zeropp lab run --nodes 2 --ranks-per-node 2 --link 226mbit -- benchmarks/step_timelines.py steps.json

The model and the link are those of docs/data/bench-paper.json. The first rank writes its profile and ledger,
and benchmarks/pictures.py draws them from docs/data/steps.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from zeropp.comm.profiler_labels import profile_all_threads
from zeropp.tools.bench.profile import part_of
from zeropp.tools.bench.training import FsdpTraining
from zeropp.tools.bench.workload import Workload
from zeropp.tools.strategies import find_strategy

WORKLOAD = Workload(layers=6, width=384, context=128, batch=4)
STRATEGIES = ("wire16", "default")
WARM_UP_STEPS = 4
MICROSECONDS = 1e-6


def main(path: Path) -> None:
    dist.init_process_group("gloo")
    found = [measure(name) for name in STRATEGIES]
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str) -> dict[str, Any]:
    training = FsdpTraining(find_strategy(name), WORKLOAD, int(os.environ["LOCAL_WORLD_SIZE"]))
    assert training.zpp is not None
    label_forward(training.model)
    for _ in range(WARM_UP_STEPS):
        training.step(1)
    before = training.zpp.ledger.copy()
    dist.barrier()
    with profile_all_threads() as profiler, record_function("step"):
        training.step(1)
    sent = training.zpp.ledger.since(before)
    return {
        "strategy": name,
        "title": training.strategy.title,
        "ranks": dist.get_world_size(),
        "parameters": training.parameters(),
        **read_profile(profiler),
        "sent": [
            [*key, traffic.calls, traffic.wire_bytes, traffic.across_bytes] for key, traffic in sent.rows()
        ],
    }


def label_forward(model: nn.Module) -> None:
    label: Any = record_function("forward")

    def start(*_: object) -> None:
        label.__enter__()

    def stop(*_: object) -> None:
        label.__exit__(None, None, None)

    model.register_forward_pre_hook(start, prepend=True)
    model.register_forward_hook(stop)


def read_profile(profiler: Any) -> dict[str, Any]:
    """Return the step's duration, phases and spans, in seconds from its start."""
    events = list(profiler.events())
    (step,) = (event for event in events if event.name == "step")
    (forward,) = (event for event in events if event.name == "forward")
    (optimizer,) = (event for event in events if event.name.startswith("Optimizer.step"))
    origin = step.time_range.start

    def seconds(event: Any) -> tuple[float, float]:
        span = event.time_range
        return round((span.start - origin) * MICROSECONDS, 6), round((span.end - origin) * MICROSECONDS, 6)

    end = seconds(step)[1]
    labelled = sorted(
        (*seconds(event), event) for event in events if part_of(event.name) and event is not step
    )
    spans = [
        [_kind(str(part)), start, stop, f"{part}, {event.name.split('(')[1][:-1]}"]
        for start, stop, event in labelled
        if (part := part_of(event.name)) != "wait"
    ]
    reached = 0.0
    for start, stop, event in labelled:  # compute is the time of the training thread without a label
        if event.thread == step.thread:
            if start > reached:
                spans.append(["compute", reached, start, "compute"])
            reached = max(reached, stop)
    spans.append(["compute", reached, end, "compute"])
    phases = [
        ["forward", 0.0, seconds(forward)[1]],
        ["backward", seconds(forward)[1], seconds(optimizer)[0]],
        ["optimizer", seconds(optimizer)[0], end],
    ]
    return {"seconds": end, "phases": phases, "spans": spans}


def _kind(part: str) -> str:
    if part.endswith("in-node"):
        return "in-node link"
    return "across link" if part.endswith(("across", "flat")) else "codec"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
