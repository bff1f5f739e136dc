"""Lanes by themselves: order, errors, and the end of their threads."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch

from zeropp.comm.lanes import Lane


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "zeropp gather"]


def test_jobs_run_in_order_beside_whoever_gave_them() -> None:
    lane, done, gate = Lane("gather"), [], threading.Event()

    def job(number: int) -> None:
        gate.wait()
        done.append((number, threading.current_thread().name))

    works = [lane.run("blocks.0", partial(job, number)) for number in range(5)]
    assert not works[0].is_completed()
    gate.set()
    assert all(work.wait() for work in works)
    assert done == [(number, "zeropp gather") for number in range(5)]


def test_an_error_names_the_unit_and_is_raised_once() -> None:
    lane = Lane("reduce")

    def fail() -> None:
        raise KeyError("the wire is cut")

    failed, next_one = lane.run("blocks.7", fail), lane.run("blocks.6", lambda: None)
    with pytest.raises(KeyError, match="the wire is cut") as caught:
        failed.wait()
    assert caught.value.__notes__ == ["in the reduce of unit 'blocks.7', beside the training thread"]
    assert failed.wait()  # whoever asks again has been told
    assert next_one.wait()


def test_a_thread_lives_as_long_as_there_is_work() -> None:
    lane = Lane("gather")
    for _ in range(3):
        lane.run("a", lambda: None).wait()
        deadline = time.monotonic() + 60
        while threads():
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_inference_mode_goes_with_the_job() -> None:
    with torch.inference_mode():
        out = torch.zeros(3)
        lane = Lane("gather")
        lane.run("a", partial(torch.add, out, 1.0, out=out)).wait()  # an error outside of inference mode
    assert out.tolist() == [1.0, 1.0, 1.0]
    seen: list[bool] = []
    lane.run("a", lambda: seen.append(torch.is_grad_enabled())).wait()
    assert seen == [False]
