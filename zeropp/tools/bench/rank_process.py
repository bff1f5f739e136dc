"""A rank of the benchmark. It serves requests of the benchmark process over a unix socket, outside all links.

A rank has one model at a time. Each model has a new process group, so that it starts like a new job.
"""

from __future__ import annotations

import gc
import logging
import os
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import assert_never

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ...comm.profiler_labels import profile_all_threads
from ..lab.cluster import INTERFACE
from ..peak_memory import PeakMemory
from .messages import (
    Answer,
    Build,
    Built,
    Choose,
    Chosen,
    Failure,
    Memory,
    ProfiledStep,
    ProfileStep,
    ReadMemory,
    Request,
    Steps,
    TakeSteps,
)
from .profile import split_step
from .training import BenchTraining, FsdpTraining, start_training

STORE_PORT = 29400
TIMEOUT = timedelta(seconds=600)


class RankProcess:
    """One rank, with the model that it trains at the moment."""

    def __init__(self) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        self.store = TCPStore(
            os.environ["MASTER_ADDR"], STORE_PORT, self.world_size, self.rank == 0, timeout=TIMEOUT
        )
        self.builds = 0
        self.training: BenchTraining | None = None
        self.peak_memory: PeakMemory | None = None

    def handle(self, request: Request) -> Answer:
        match request:
            case Build():
                return self._build(request)
            case TakeSteps():
                return self._take_steps(request)
            case Choose():
                return self._choose(request)
            case ReadMemory():
                return self._read_memory()
            case ProfileStep():
                return self._profile_step(request)
            case _:
                assert_never(request)

    def _build(self, request: Build) -> Built:
        """Replace the model. If a strategy raises an exception, all ranks raise it and keep running."""
        self._drop()
        self.builds += 1
        dist.init_process_group(
            "gloo",
            store=PrefixStore(str(self.builds), self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=TIMEOUT,
        )
        self.peak_memory = PeakMemory()
        self.training = start_training(request.strategy, request.workload, self.ranks_per_node)
        self.peak_memory.restart()  # memory that only the build needed does not count
        return Built(self.training.parameters())

    def _drop(self) -> None:
        self.training = None
        gc.collect()
        gc.freeze()  # only imported modules are left, so later collections can skip them
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def _take_steps(self, request: TakeSteps) -> Steps:
        training = self._training()
        ledger_before = training.ledger_bytes()
        tx_before, rx_before = _link_bytes()
        seconds, losses = [], []
        cpu_before, started = time.process_time(), time.monotonic()
        for _ in range(request.count):
            losses.append(training.step(request.micro_batches))
            now = time.monotonic()
            seconds.append(now - started)
            started = now
        cpu_seconds = time.process_time() - cpu_before
        tx_bytes, rx_bytes = _link_bytes()
        ledger_now = training.ledger_bytes()
        ledger_bytes = None if ledger_now is None or ledger_before is None else ledger_now - ledger_before
        return Steps(
            seconds,
            losses,
            tx_bytes=tx_bytes - tx_before,
            rx_bytes=rx_bytes - rx_before,
            ledger_bytes=ledger_bytes,
            cpu_seconds=cpu_seconds,
            phase_bytes=list(training.phase_bytes),
        )

    def _choose(self, request: Choose) -> Chosen:
        training = self._training()
        assert isinstance(training, FsdpTraining)
        return Chosen(training.choose(request.micro_batches))

    def _profile_step(self, request: ProfileStep) -> ProfiledStep:
        dist.barrier()
        with profile_all_threads() as profiler:
            started = time.monotonic()
            self._training().step(request.micro_batches)
            step_ms = (time.monotonic() - started) * 1e3
        return ProfiledStep(split_step(profiler, step_ms))

    def _read_memory(self) -> Memory:
        training = self._training()
        assert self.peak_memory is not None
        return Memory(self.peak_memory.bytes, training.model_state_bytes(), training.communication_bytes())

    def _training(self) -> BenchTraining:
        assert self.training is not None
        return self.training


def _link_bytes() -> tuple[int, int]:
    """Return the bytes that this node has sent and received.

    /proc/net/dev shows the network namespace of the reader. No rank sends between the two barriers.
    """
    dist.barrier()
    lines = Path("/proc/net/dev").read_text().splitlines()
    (fields,) = (line.split(":")[1].split() for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    dist.barrier()
    return int(fields[8]), int(fields[0])


def main(address: str) -> None:
    logging.getLogger("zeropp").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    process = RankProcess()
    with Client(address, family="AF_UNIX") as connection:
        connection.send(process.rank)
        while True:
            try:
                request = connection.recv()
            except EOFError:
                return
            try:
                connection.send(process.handle(request))
            except Exception:
                connection.send(Failure(traceback.format_exc()))
