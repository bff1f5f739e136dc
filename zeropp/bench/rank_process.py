"""A rank of the benchmark: does what the bench process says over a unix socket, which crosses no link.

    python -m zeropp.bench.rank_process SOCKET        (started by torchrun)

One model at a time. Every model gets a process group of its own, so that it starts like a fresh job.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.profiler import ProfilerActivity, profile

from ..lab.cluster import INTERFACE
from ..peak_memory import PeakMemory
from ..strategies import find_strategy
from .profile import split_step
from .training import Training, start_training
from .workload import Workload

STORE_PORT = 29400
TIMEOUT = timedelta(seconds=600)


@dataclass(frozen=True)
class Steps:
    """Some optimizer steps on this rank."""

    seconds: list[float]
    losses: list[float]
    tx_bytes: int
    rx_bytes: int
    """Of this rank's node, over all steps."""
    ledger_bytes: int | None
    """Of this rank, over all steps."""
    cpu_seconds: float
    """Of this rank, with the threads of gloo, over all steps."""


class RankProcess:
    def __init__(self) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        self.store = TCPStore(
            os.environ["MASTER_ADDR"], STORE_PORT, self.world_size, self.rank == 0, timeout=TIMEOUT
        )
        self.builds = 0
        self.training: Training | None = None
        self.peak_memory: PeakMemory | None = None

    def build(self, strategy: str, workload: Workload) -> dict[str, int]:
        """Replace the model. A strategy may refuse; it does so on all ranks, and the process goes on."""
        self.drop()
        self.builds += 1
        dist.init_process_group(
            "gloo",
            store=PrefixStore(str(self.builds), self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=TIMEOUT,
        )
        self.peak_memory = PeakMemory()
        self.training = start_training(find_strategy(strategy), workload, self.ranks_per_node)
        self.peak_memory.restart()  # what building took is over
        return {"parameters": self.training.parameters()}

    def drop(self) -> None:
        self.training = None
        gc.collect()
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def steps(self, count: int, micro_batches: int) -> dict[str, Any]:
        training = self._training()
        ledger_before = training.ledger_bytes()
        (tx_before, rx_before), seconds, losses = _link_bytes(), [], []
        cpu_before, started = time.process_time(), time.monotonic()
        for _ in range(count):
            losses.append(training.step(micro_batches))
            now = time.monotonic()
            seconds.append(now - started)
            started = now
        cpu_seconds = time.process_time() - cpu_before
        tx_bytes, rx_bytes = _link_bytes()
        ledger_now = training.ledger_bytes()
        counted = None if ledger_now is None or ledger_before is None else ledger_now - ledger_before
        return asdict(
            Steps(seconds, losses, tx_bytes - tx_before, rx_bytes - rx_before, counted, cpu_seconds)
        )

    def timeline(self, micro_batches: int) -> dict[str, float]:
        """Where the time of one step goes, in ms."""
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            started = time.monotonic()
            self._training().step(micro_batches)
            step_ms = (time.monotonic() - started) * 1e3
        return split_step(profiler, step_ms)

    def memory(self) -> dict[str, int]:
        training = self._training()
        assert self.peak_memory is not None
        return {
            "peak_bytes": self.peak_memory.bytes,
            "model_state_bytes": training.model_state_bytes(),
            "communication_bytes": training.communication_bytes(),
        }

    def _training(self) -> Training:
        assert self.training is not None
        return self.training


def _link_bytes() -> tuple[int, int]:
    """Sent and received by this node, between steps of all ranks.

    /proc/net/dev is of the network namespace of whoever reads it."""
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
                command, arguments = connection.recv()
            except EOFError:
                return
            try:
                connection.send((True, getattr(process, command)(**arguments)))
            except Exception:
                connection.send((False, traceback.format_exc()))


if __name__ == "__main__":
    main(sys.argv[1])
