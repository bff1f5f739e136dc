"""The ranks of the benchmark, from the side of the benchmark process. Each request goes to all ranks."""

from __future__ import annotations

import contextlib
import time
from multiprocessing.connection import Connection, Listener, wait
from types import TracebackType
from typing import Any, Self, TypeVar

from ..lab import Cluster, JobError
from ..strategies import Strategy
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
from .workload import Workload

START_SECONDS, ANSWER_SECONDS = 120.0, 1200.0
AnswerT = TypeVar("AnswerT", bound=Answer)
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
"""Settings of glibc for ranks of all strategies. By default glibc returns freed memory to the kernel, and
each step faults it in again, page by page. With these settings it keeps memory, like a GPU's caching
allocator."""


class StrategyError(Exception):
    """A strategy cannot run. All ranks have raised the same error."""


class Ranks:
    """A `RankProcess` on each rank of a cluster.

    with Cluster() as cluster, Ranks(cluster) as ranks:
        ranks.build(find_strategy("default"), Workload())
        print(ranks.take_steps(count=4, micro_batches=1))
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._connections: list[Connection] = []

    def __enter__(self) -> Self:
        address = str(self._cluster.folder / "socket")
        with Listener(address, family="AF_UNIX", backlog=self._cluster.world_size) as listener:
            self._job = self._cluster.start(["-m", "zeropp.tools.bench", address], environment=KEEP_MEMORY)
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

    def build(self, strategy: Strategy, workload: Workload) -> list[Built]:
        """Build a new model on every rank. Raises StrategyError if the strategy cannot run."""
        return self._request(Build(strategy, workload), Built)

    def take_steps(self, count: int, micro_batches: int) -> list[Steps]:
        return self._request(TakeSteps(count, micro_batches), Steps)

    def choose(self, micro_batches: int) -> list[Chosen]:
        return self._request(Choose(micro_batches), Chosen)

    def read_memory(self) -> list[Memory]:
        return self._request(ReadMemory(), Memory)

    def profile_step(self, micro_batches: int) -> list[ProfiledStep]:
        return self._request(ProfileStep(micro_batches), ProfiledStep)

    def _request(self, request: Request, answer_type: type[AnswerT]) -> list[AnswerT]:
        """Send a request to all ranks and return their answers, by rank."""
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # the rank has ended, and `_receive` raises
                connection.send(request)
        name = type(request).__name__
        outcomes = self._receive(name)
        failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Failure)}
        if len(failures) == len(outcomes):
            raise StrategyError(failures[0].traceback.strip().splitlines()[-1])
        if failures:
            raise self._failure(f"{name} failed on some ranks: {failures}")
        answers: list[AnswerT] = []
        for _, answer in sorted(outcomes.items()):
            assert isinstance(answer, answer_type)
            answers.append(answer)
        return answers

    def _receive(self, name: str) -> dict[int, Answer | Failure]:
        """Wait for the answers of all ranks to the request `name`."""
        outcomes: dict[int, Answer | Failure] = {}
        pending: dict[Any, int] = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + ANSWER_SECONDS
        while pending:
            for connection in wait(list(pending), timeout=1.0):
                rank = pending.pop(connection)
                try:
                    outcomes[rank] = self._connections[rank].recv()
                except (EOFError, ConnectionError):
                    raise self._failure(f"rank {rank} ended in {name}") from None
            if pending and time.monotonic() > deadline:
                raise self._failure(f"ranks {sorted(pending.values())} did not answer {name}")
        return outcomes

    def _accept(self, listener: Listener) -> list[Connection]:
        """Accept the connections of all ranks, and return them by rank."""
        accepted: dict[int, Connection] = {}
        deadline = time.monotonic() + START_SECONDS
        sock = listener._listener._socket  # type: ignore[attr-defined]  # Listener has no timeout
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
        """Stop the job and return its error."""
        self._job.stop()
        return JobError(self._job.result().explain(what))
