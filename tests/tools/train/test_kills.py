"""Ranks and nodes that are killed under torchrun: the resumed run has the same losses, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.ranks import Ranks
from tests.tools.train.runs import command_line, small_run, train_here
from zeropp import Config
from zeropp.tools.lab.job import TORCHRUN
from zeropp.tools.train.checkpoint import steps_in
from zeropp.tools.train.config import CheckpointConfig, EvaluationConfig, RunConfig
from zeropp.tools.train.metrics import FILE_NAME, Metrics

SECONDS = 300.0  # a limit for each wait, which also a busy machine meets
STEPS = 30
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Make torchrun open a store per restart. torch 2.13 shares one store, whose address a restarted node never
gets."""
SHORT_TIMEOUTS = "keep_alive_interval=1,keep_alive_max_attempt=10,last_call_timeout=1"
"""Make torchrun give up a node after ten silent seconds. An agent on a busy machine may be silent for two."""


@pytest.fixture(scope="module")
def undisturbed(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Two nodes of one rank each."""
    run = small_run(
        tmp_path_factory.mktemp("undisturbed"),
        steps=STEPS,
        zeropp=Config(node_size=1),
        checkpoint=CheckpointConfig(every=6),
        evaluation=EvaluationConfig(every=15, batches=2),
    )
    ranks.run(train_here, run, world=2)
    return run


@contextmanager
def torchrun(run: RunConfig, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start an agent in a separate session, and kill it at the end of the block."""
    command = [*TORCHRUN, *options, "-m", "zeropp", "train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **NEW_STORE}
    log = run.folder / f"{time.monotonic_ns()}.log"
    with log.open("wb") as out:
        agent = subprocess.Popen(
            [*command, *command_line(run)], env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            yield agent
        finally:
            kill_all(agent)
            print(log.read_text()[-5000:])  # noqa: T201  # pytest shows it if the test fails


def kill_all(agent: subprocess.Popen[bytes]) -> None:
    """Kill the agent and its ranks, which have separate sessions."""
    for pid in [agent.pid, *ranks_of(agent)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    agent.wait()


def ranks_of(agent: subprocess.Popen[bytes]) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]
    except OSError:
        return []


def wait_for_step(run: RunConfig, step: int, agent: subprocess.Popen[bytes]) -> None:
    """Wait until the run has completed `step` and has a complete checkpoint."""
    deadline = time.monotonic() + SECONDS
    path = run.folder / FILE_NAME
    while not (
        path.exists() and f'"step": {step},' in path.read_text() and steps_in(run.folder / "checkpoints")
    ):
        assert agent.poll() is None, "it ended"
        assert time.monotonic() < deadline, f"no step {step}"
        time.sleep(0.01)


def finish(agent: subprocess.Popen[bytes]) -> int:
    return agent.wait(SECONDS)


def check_equal(run: RunConfig, undisturbed: RunConfig, starts: int) -> None:
    ours, theirs = Metrics(run.folder / FILE_NAME), Metrics(undisturbed.folder / FILE_NAME)
    assert len(ours.starts) == starts
    assert all(start.first_step > 1 for start in ours.starts[1:])
    assert [r.loss for r in ours.steps] == [r.loss for r in theirs.steps]
    assert [r.grad_norm for r in ours.steps] == [r.grad_norm for r in theirs.steps]
    assert ours.evaluations == theirs.evaluations


def test_torchrun_restarts_a_killed_rank_and_the_run_resumes(undisturbed: RunConfig, tmp_path: Path) -> None:
    run = replace(undisturbed, folder=tmp_path)
    with torchrun(run, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1") as agent:
        wait_for_step(run, 8, agent)
        os.kill(ranks_of(agent)[1], signal.SIGKILL)
        assert finish(agent) == 0
    check_equal(run, undisturbed, starts=2)


def test_a_killed_node_rejoins_and_signals_to_torchrun_save(
    ranks: Ranks, undisturbed: RunConfig, tmp_path: Path
) -> None:
    """The signals are those of Ctrl-C and of a scheduler that preempts a node. One job tests both, because
    starts take the most time.

    The agents meet at a store of this test. It has a port before they start, and outlives both of them."""
    run = replace(undisturbed, folder=tmp_path)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    options = [
        *("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"localhost:{store.port}"),
        *("--rdzv-conf", f"is_host=0,join_timeout={SECONDS:.0f},{SHORT_TIMEOUTS}"),
    ]
    with torchrun(run, *options) as first:
        with torchrun(run, *options) as second:
            wait_for_step(run, 8, first)
            kill_all(second)
        with torchrun(run, *options) as second:
            wait_for_step(run, 14, first)
            first.send_signal(signal.SIGINT)
            second.send_signal(signal.SIGTERM)
            finish(first)
            finish(second)
    stopped = Metrics(run.folder / FILE_NAME)
    assert stopped.end is not None
    assert stopped.end.step == stopped.steps[-1].step == max(steps_in(run.folder / "checkpoints")) < STEPS
    ranks.run(train_here, run, world=2)
    check_equal(run, undisturbed, starts=3)
