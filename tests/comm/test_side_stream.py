"""Transfers on a side stream, with streams that only log their calls: this machine has no device with
streams. The device of tests/streamed shows what happens to data."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeropp.comm import side_stream
from zeropp.comm.execution import Transfer


class OneStep(Transfer):
    """A transfer that never waits."""

    unit, device = "unit", torch.device("cpu")

    def __init__(self, run: Callable[[], object], *tensors: torch.Tensor) -> None:
        self._run, self.tensors = run, tensors

    def prepare(self, slot: int) -> None:
        """No buffers."""

    def steps(self) -> Generator[None]:
        self._run()
        yield from ()


def run_asynchronously(run: Callable[[], object], *tensors: torch.Tensor) -> dist.Work:
    work = side_stream.SideStream().submit(OneStep(run, *tensors), async_op=True)
    assert work is not None
    return work


class Stream:
    """Logs its calls."""

    def __init__(self, name: str, log: list[str], current: list[Stream]) -> None:
        self.name, self.log, self.current = name, log, current

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"event on {self.name}")
        return f"event on {self.name}"

    def __enter__(self) -> None:
        self.current.append(self)

    def __exit__(self, *error: object) -> None:
        self.current.pop()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[Stream]]:
    log: list[str] = []
    current: list[Stream] = []
    current.append(Stream("main", log, current))
    side = Stream("side", log, current)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: current[-1])
    monkeypatch.setattr(side_stream, "_side_stream", lambda device: side)
    return log, current


def test_hops_run_on_their_own_stream_and_only_who_waits_comes_after(streams: Any) -> None:
    log, current = streams
    work = run_asynchronously(lambda: log.append(f"hops on {current[-1].name}"), torch.zeros(1))
    assert isinstance(work, dist.Work)  # or FSDP2 would not wait for it
    assert log == ["side waits for main", "hops on side", "event on side"]
    log.clear()
    with Stream("another", log, current):
        assert work.wait()
    assert log == ["another waits for event on side"]


def test_tensors_are_kept_until_somebody_has_waited(streams: Any) -> None:
    output = torch.zeros(8)
    kept = weakref.ref(output)
    work = run_asynchronously(lambda: None, output)
    del output
    gc.collect()
    assert kept() is not None
    work.wait()
    gc.collect()
    assert kept() is None


def test_a_failure_leaves_the_current_stream_as_it_was(streams: Any) -> None:
    _, current = streams

    def fail() -> None:
        raise RuntimeError("no connection")

    with pytest.raises(RuntimeError, match="no connection"):
        run_asynchronously(fail)
    assert [stream.name for stream in current] == ["main"]
