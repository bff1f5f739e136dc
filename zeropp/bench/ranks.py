"""The ranks of the benchmark, seen from the bench process: one call, all ranks, all answers."""

from __future__ import annotations

import contextlib
import time
from multiprocessing.connection import Connection, Listener, wait
from types import TracebackType
from typing import Any, Self

from ..lab import Cluster, JobError

START_SECONDS, CALL_SECONDS = 120.0, 1200.0
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
"""glibc gives freed memory back to the kernel, and every step would fault it in again, page by page. Here
ranks keep it, as with the caching allocator of a GPU, in every strategy alike."""


class StrategyError(Exception):
    """A strategy cannot be run: the same error on every rank."""


class Ranks:
    """A `RankProcess` on every rank of a cluster.

    with Cluster() as cluster, Ranks(cluster) as ranks:
        ranks.call("build", strategy="default", workload=Workload())
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._connections: list[Connection] = []

    def __enter__(self) -> Self:
        address = str(self._cluster.folder / "socket")
        with Listener(address, family="AF_UNIX", backlog=self._cluster.world_size) as listener:
            self._job = self._cluster.start(
                ["-m", "zeropp.bench.rank_process", address], environment=KEEP_MEMORY
            )
            self._connections = self._accept(listener)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()
        if kind is None:
            self._job.wait(60.0)
        else:
            self._job.stop()

    def call(self, command: str, **arguments: Any) -> list[Any]:
        """Run a method of RankProcess on all ranks; what it returned, by rank."""
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # it ended; the answer will say so
                connection.send((command, arguments))
        outcomes: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + CALL_SECONDS
        while len(outcomes) < len(self._connections):
            waiting = {c: r for r, c in enumerate(self._connections) if r not in outcomes}
            ready = wait(list(waiting), timeout=1.0)
            for rank in [waiting[c] for c in ready if isinstance(c, Connection)]:
                try:
                    outcomes[rank] = self._connections[rank].recv()
                except (EOFError, ConnectionError):
                    raise self._failure(f"rank {rank} ended in {command!r}") from None
            if time.monotonic() > deadline:
                raise self._failure(f"ranks {sorted(waiting.values())} did not answer {command!r}")
        errors = {rank: answer for rank, (succeeded, answer) in outcomes.items() if not succeeded}
        if len(errors) == len(outcomes):
            raise StrategyError(errors[0].strip().splitlines()[-1])
        if errors:
            raise self._failure(f"{command!r} failed on some ranks: {errors}")
        return [outcomes[rank][1] for rank in range(len(outcomes))]

    def _accept(self, listener: Listener) -> list[Connection]:
        """Connections in order of rank."""
        accepted: dict[int, Connection] = {}
        deadline = time.monotonic() + START_SECONDS
        sock = listener._listener._socket  # type: ignore[attr-defined]  # the only way to a timeout
        sock.settimeout(1.0)
        while len(accepted) < self._cluster.world_size:
            try:
                connection = listener.accept()
            except TimeoutError:
                if time.monotonic() > deadline or any(p.poll() is not None for p in self._job.processes):
                    raise self._failure("the ranks did not start") from None
                continue
            accepted[connection.recv()] = connection
        return [accepted[rank] for rank in range(len(accepted))]

    def _failure(self, what: str) -> JobError:
        self._job.stop()
        last = self._job.last_lines()
        words = [f"--- {who}\n" + "\n".join(lines[-15:]) for who, lines in sorted(last.items())]
        return JobError("\n".join([what, *words]))
