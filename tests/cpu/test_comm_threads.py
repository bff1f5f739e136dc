"""Comm threads: the order of transfers, errors, the end of the thread, and two transfers on the wire."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zeropp
from tests.comm.test_all_gather import make_all_gather, shard_of
from tests.examples import examples
from tests.ranks import HANG_SECONDS, Ranks
from zeropp.comm import Scratch, Weight
from zeropp.comm.execution import Transfer
from zeropp.comm.wire import tag_of
from zeropp.cpu.comm_threads import CommThread, ThreadWork, comm_thread


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "zeropp gather"]


Steps = Callable[[int], Generator[None]]
"""Steps of a transfer, by its slot."""


class Given(Transfer):
    """A transfer of the given steps."""

    device = torch.device("cpu")

    def __init__(self, unit: str, steps: Steps, reads_first: bool = False) -> None:
        self.unit, self.reads_input_first, self._steps, self._slot = unit, reads_first, steps, 0

    def prepare(self, slot: int) -> None:
        self._slot = slot

    def steps(self) -> Generator[None]:
        return self._steps(self._slot)


def submit(thread: CommThread, unit: str, steps: Steps, reads_first: bool = False) -> ThreadWork:
    return thread.submit(Given(unit, steps, reads_first))


def at_once(run: Callable[[], object]) -> Steps:
    """Steps that never wait."""

    def steps(_: int) -> Generator[None]:
        run()
        yield from ()

    return steps


def test_jobs_run_in_order_beside_whoever_gave_them() -> None:
    thread, done, gate = CommThread("gather"), [], threading.Event()

    def job(number: int) -> None:
        gate.wait()
        done.append((number, threading.current_thread().name))

    works = [submit(thread, "blocks.0", at_once(partial(job, number))) for number in range(5)]
    assert not works[0].is_completed()
    gate.set()
    assert all(work.wait() for work in works)
    assert done == [(number, "zeropp gather") for number in range(5)]


RAISES_MEANWHILE = """
import sys, time
from pathlib import Path
from zeropp.comm.execution import Transfer
from zeropp.cpu.comm_threads import comm_thread

class Slow(Transfer):
    unit = "blocks.0"

    def prepare(self, slot):
        pass

    def steps(self):
        yield
        time.sleep(1)
        Path(sys.argv[1]).touch()

comm_thread("gather").submit(Slow())
raise RuntimeError("in the loop")
"""


def test_after_an_error_the_exit_waits_for_what_is_on_its_way(tmp_path: Path) -> None:
    """Else its thread could end the process, with a signal in the place of the error."""
    arrived = tmp_path / "arrived"
    command = [sys.executable, "-c", RAISES_MEANWHILE, str(arrived)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert arrived.exists()
    assert done.returncode == 1
    assert "RuntimeError: in the loop" in done.stderr


def logged(log: list[str], gate: threading.Event, name: str, slot: int) -> Generator[None]:
    """A job that waits twice."""
    gate.wait()
    log.append(f"{name} starts in slot {slot}")
    yield
    log.append(f"{name} goes on")
    yield
    log.append(f"{name} ends")


def test_the_next_job_starts_before_the_oldest_goes_on() -> None:
    thread, gate = CommThread("reduce"), threading.Event()
    log: list[str] = []
    works = [submit(thread, name, partial(logged, log, gate, name)) for name in "abc"]
    gate.set()
    assert all(work.wait() for work in works)
    assert log == [
        "a starts in slot 0", "b starts in slot 1", "a goes on", "a ends",
        "c starts in slot 0", "b goes on", "b ends", "c goes on", "c ends",
    ]  # fmt: skip


def test_jobs_of_one_unit_are_never_at_work_together() -> None:
    thread, gate = CommThread("reduce"), threading.Event()
    log: list[str] = []
    works = [submit(thread, "blocks.0", partial(logged, log, gate, name)) for name in "ab"]
    gate.set()
    assert all(work.wait() for work in works)
    assert log == [
        "a starts in slot 0", "a goes on", "a ends", "b starts in slot 1", "b goes on", "b ends",
    ]  # fmt: skip


@pytest.mark.parametrize("reads_first", [False, True])
def test_what_is_sent_may_go_as_soon_as_it_was_read(reads_first: bool) -> None:
    gate = threading.Event()

    def job(_: int) -> Generator[None]:
        yield
        gate.wait()

    work = submit(CommThread("reduce"), "a", job, reads_first=reads_first)
    if reads_first:
        work.wait_until_read()  # while the job is stuck
        assert not work.is_completed()
    gate.set()
    work.wait_until_read()
    assert work.wait()


def test_an_error_names_the_unit_and_is_raised_once() -> None:
    thread = CommThread("reduce")

    def fail(_: int) -> Generator[None]:
        yield
        raise KeyError("the wire is cut")

    failed, next_one = submit(thread, "blocks.7", fail), submit(thread, "blocks.6", at_once(lambda: None))
    with pytest.raises(KeyError, match="the wire is cut") as caught:
        failed.wait()
    assert caught.value.__notes__ == ["in the reduce of unit 'blocks.7', in a comm thread"]
    assert failed.wait()  # whoever asks again has been told
    failed.wait_until_read()
    assert next_one.wait()


def test_after_an_error_no_job_gets_the_buffers_of_another() -> None:
    thread, log, gate = CommThread("gather"), list[str](), threading.Event()

    def fail(_: int) -> Generator[None]:
        raise KeyError("at once")
        yield

    first = submit(thread, "a", partial(logged, log, gate, "a"))
    failed, third = submit(thread, "b", fail), submit(thread, "c", partial(logged, log, gate, "c"))
    gate.set()
    with pytest.raises(KeyError):
        failed.wait()
    assert first.wait()
    assert third.wait()
    assert log.index("a ends") < log.index("c starts in slot 0")


def test_a_thread_lives_as_long_as_there_is_work() -> None:
    thread = CommThread("gather")
    for _ in range(3):
        submit(thread, "a", at_once(lambda: None)).wait()
        deadline = time.monotonic() + HANG_SECONDS
        while threads():
            assert time.monotonic() < deadline
            time.sleep(0.001)


class SlowToGo:
    """Goes with a work, and takes its time."""

    def __del__(self) -> None:
        time.sleep(0.5)


def test_the_exit_waits_for_a_thread_that_only_has_to_end() -> None:
    """It is what lets go of the last work, and must not do so while Python ends."""
    thread, gate = CommThread("gather"), threading.Event()
    work: Any = submit(thread, "blocks.0", at_once(gate.wait))
    work.slow = SlowToGo()
    del work
    gate.set()
    time.sleep(0.1)
    thread.join()
    assert threads() == []


def test_inference_mode_goes_with_the_job() -> None:
    with torch.inference_mode():
        out = torch.zeros(3)
        thread = CommThread("gather")
        submit(thread, "a", at_once(partial(torch.add, out, 1.0, out=out))).wait()  # an error outside of it
    assert out.tolist() == [1.0, 1.0, 1.0]
    seen: list[bool] = []
    submit(thread, "a", at_once(lambda: seen.append(torch.is_grad_enabled()))).wait()
    assert seen == [False]


def test_nothing_on_the_wire_has_the_tag_of_another() -> None:
    units = ["(root)", "head", *(f"blocks.{number}" for number in range(100))]
    tags = {tag_of(unit, chunk) for unit in units for chunk in range(16)}
    assert len(tags) == 16 * len(units)
    assert min(tags) >= 0
    assert max(tags) < 2**31  # gloo's


def _gather_beside(seed: int, fresh: list[bool], numel: int) -> list[Tensor]:
    """One unit after the other, given by every rank at moments of its own. Where a unit is fresh, its first
    hop is left out, so that its only hop could overtake the last one of the unit before it."""
    moments = random.Random(f"{seed} {dist.get_rank()}")
    config, scratch = zeropp.Config(node_size=2), Scratch()
    units = []
    for number, is_fresh in enumerate(fresh):
        comm = make_all_gather(config, [Weight(numel, torch.float32)])
        comm.wire.unit, comm.wire.scratch = f"blocks.{number}", scratch
        comm.execution = comm_thread("gather")
        units.append((comm, shard_of(100 * number + dist.get_rank(), numel, torch.float32)))
        if is_fresh:
            _start_gather(*units[-1])[1].wait()
    started = []
    for comm, shard in units:
        time.sleep(moments.choice([0.0, 0.0, 0.003]))
        started.append(_start_gather(comm, shard))
    for _, work in started:
        work.wait()
    return [out for out, _ in started]


def _start_gather(comm: Any, shard: Tensor) -> tuple[Tensor, Any]:
    out = torch.empty(dist.get_world_size() * shard.numel())
    mine = out.view(dist.get_world_size(), -1)[dist.get_rank()].copy_(shard)
    return out, comm(output_tensor=out, input_tensor=mine, group=dist.group.WORLD)


@examples(8)
@given(
    seed=st.integers(0, 1000),
    fresh=st.lists(st.booleans(), min_size=3, max_size=12),
    numel=st.sampled_from([50, 200_000]),
)
def test_gathers_that_overtake_each_other_get_their_own_weights(
    ranks: Ranks, seed: int, fresh: list[bool], numel: int
) -> None:
    first, *others = ranks.run(_gather_beside, seed, fresh, numel)
    for unit, weights in enumerate(first):
        exact = torch.cat([shard_of(100 * unit + rank, numel, torch.float32) for rank in range(4)])
        assert (weights - exact).abs().max() <= exact.abs().max() * 0.51 / 127
        assert all(torch.equal(weights, other[unit]) for other in others)
