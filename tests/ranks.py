"""Real ranks for tests: processes that import torch once and then run one test after the other.

Every job gets a gloo process group of its own, of the size it asks for, and a timeout. A job is a function at
module level and its arguments; what it returns on each rank comes back as a list.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE_SECONDS = 5.0


class RankError(AssertionError):
    """A job raised on some rank, or did not finish in time."""


class Ranks:
    """A pool of `size` ranks, started at the first job and again after a job that had to be killed."""

    def __init__(
        self, size: int, folder: Path, backend: str = "gloo", prepare: Callable[[], None] | None = None
    ) -> None:
        """`prepare` runs once in each process, before its first process group."""
        self.size = size
        self._folder = folder  # for rendezvous
        self._backend, self._prepare = backend, prepare
        self._workers: list[tuple[Any, Connection]] = []
        self._jobs = 0

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int = 4,
        timeout: float = 120.0,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """`function(*args)` on ranks 0 .. world - 1, inside a process group; the results by rank."""
        assert world <= self.size
        if not self._workers:
            self._start()
        self._jobs += 1
        store = self._folder / f"store-{self._jobs}"
        job = (function, args, world, str(store), timeout, env or {})
        for rank, (_, connection) in enumerate(self._workers[:world]):
            connection.send((rank, *job))
        return self._collect(world, time.monotonic() + timeout)

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for _ in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._backend, self._prepare), daemon=True)
            process.start()
            self._workers.append((process, ours))

    def _collect(self, world: int, deadline: float) -> list[Any]:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers[:world])}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    succeeded, outcome = pickle.loads(connection.recv_bytes())
                except EOFError:
                    succeeded, outcome = False, "the process died"
                if succeeded:
                    results[rank] = outcome
                else:
                    failures[rank] = outcome
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)  # the others may be stuck
        if waiting or failures:
            self.close()  # whatever state the ranks are in, the next job starts with new ones
            late = f"no answer from ranks {sorted(waiting.values())}" if waiting else ""
            reports = [f"rank {rank}:\n{text}" for rank, text in sorted(failures.items())]
            raise RankError("\n".join([*reports, late]))
        return [results[rank] for rank in range(world)]


def _serve(connection: Connection, backend: str, prepare: Callable[[], None] | None) -> None:
    """The life of one rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    imported = 0
    while True:
        gc.collect()  # models of the last job, with their hooks
        if len(sys.modules) > imported:  # looking at all that modules are made of takes a quarter second
            imported = len(sys.modules)
            gc.freeze()
        try:
            rank, function, args, world, store, timeout, env = connection.recv()
        except EOFError:
            return
        old = {name: os.environ.get(name) for name in env}
        os.environ.update(env)
        try:
            torch.manual_seed(0)
            dist.init_process_group(
                backend,
                init_method=f"file://{store}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout),
            )
            outcome = (True, function(*args))
            dist.destroy_process_group()
        except BaseException:
            outcome = (False, traceback.format_exc())
        for name, value in old.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        connection.send_bytes(pickle.dumps(outcome))
