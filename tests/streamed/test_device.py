"""The device with streams itself: what it must notice, and what it must not complain about."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import Ranks
from tests.streamed import device


def notices() -> dict[str, Any]:
    here: dict[str, Any] = {}
    one, two = torch.Stream(device.NAME), torch.Stream(device.NAME)

    def seen(what: str, run: Any) -> None:
        with device.watch() as watching:
            run()
        here[what] = sorted({report.kind for report in watching.reports})

    x = torch.zeros(100, device=device.NAME)
    pinned = torch.empty(100, pin_memory=True)

    def write_and_read(ordered: bool) -> None:
        with one:
            x.add_(1)
        if ordered:
            two.wait_stream(one)
        with two:
            x.sum()

    def halves() -> None:
        with one:
            x[:50].add_(1)
        with two:
            x[50:].add_(1)

    def free_while_in_use(recorded: bool) -> None:
        with one:
            y = torch.zeros(100, device=device.NAME)
        two.wait_stream(one)
        with two:
            y.add_(1)
        if recorded:
            y.record_stream(two)
        del y
        with one:  # could get the same memory
            torch.zeros(7, device=device.NAME)

    seen("unordered", lambda: write_and_read(False))
    seen("ordered", lambda: write_and_read(True))
    seen("halves", halves)
    seen("freed", lambda: free_while_in_use(False))
    seen("freed, recorded", lambda: free_while_in_use(True))
    seen("item", lambda: x.sum().item())
    seen("to cpu", lambda: x.cpu())
    seen("index upload", lambda: x[[1, 2]])
    seen("mask", lambda: x[x > 0])
    seen("pinned", lambda: pinned.copy_(x, non_blocking=True))
    seen("arithmetic", lambda: (x.view(10, 10).T @ x.view(10, 10)).softmax(0)[2:].clone())
    return here


def test_notices_races_frees_and_synchronizations(streamed_ranks: Ranks) -> None:
    (seen,) = streamed_ranks.run(notices, world=1)
    assert seen == {
        "unordered": ["conflict"],
        "ordered": [],
        "halves": [],
        "freed": ["conflict"],
        "freed, recorded": [],
        "item": ["synchronization"],
        "to cpu": ["synchronization"],
        "index upload": ["synchronization"],
        "mask": ["synchronization"],
        "pinned": [],
        "arithmetic": [],
    }


def deliver_late() -> list[float]:
    x = torch.full((3,), 5.0, device=device.NAME)
    pinned = torch.zeros(3, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    seen = [float(pinned[0]), float(event.query())]
    device.finish()
    return [*seen, float(event.query()), float(pinned[0])]


def test_a_copy_to_pinned_memory_arrives_with_its_event(streamed_ranks: Ranks) -> None:
    assert streamed_ranks.run(deliver_late, world=1) == [[0.0, 0.0, 1.0, 5.0]]


def gather(wait: bool) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((size, 8), float(rank), device=device.NAME)
    with device.watch() as watching:
        work = dist.all_gather_into_tensor(x.view(-1), x[rank].clone(), async_op=True)
        assert work is not None
        if wait:
            work.wait()
        values = x.clone()
    if not wait:
        work.wait()
    return {"values": values.cpu()[:, 0].tolist(), "conflicts": len(watching.conflicts)}


def test_a_collective_arrives_when_it_is_waited_for(streamed_ranks: Ranks) -> None:
    assert streamed_ranks.run(gather, True, world=2) == [{"values": [0.0, 1.0], "conflicts": 0}] * 2
    early = streamed_ranks.run(gather, False, world=2)
    assert [result["values"] for result in early] == [[0.0, 0.0], [1.0, 1.0]]
    assert all(result["conflicts"] for result in early)
