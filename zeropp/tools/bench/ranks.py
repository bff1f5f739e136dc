"""The ranks of the benchmark, seen from the bench process: one request, all ranks, all answers."""

from __future__ import annotations

import contextlib
import time
from multiprocessing.connection import Connection, Listener, wait
from types import TracebackType
from typing import Self, TypeVar

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
"""glibc gives freed memory back to the kernel, and every step would fault it in again, page by page. Here
ranks keep it, as with the caching allocator of a GPU, in every strategy alike."""


class StrategyError(Exception):
    """A strategy cannot be run: the same error on every rank."""


class Ranks:
    """A `RankProcess` on every rank of a cluster.

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
        """A fresh model on every rank. Raises StrategyError if the strategy cannot be run."""
        return self._ask(Build(strategy, workload), Built)

    def take_steps(self, count: int, micro_batches: int) -> list[Steps]:
        return self._ask(TakeSteps(count, micro_batches), Steps)

    def choose(self, micro_batches: int) -> list[Chosen]:
        return self._ask(Choose(micro_batches), Chosen)

    def read_memory(self) -> list[Memory]:
        return self._ask(ReadMemory(), Memory)

    def profile_step(self, micro_batches: int) -> list[ProfiledStep]:
        return self._ask(ProfileStep(micro_batches), ProfiledStep)

    def _ask(self, request: Request, answers_with: type[AnswerT]) -> list[AnswerT]:
        """Send the request to all ranks; their answers, by rank."""
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # it ended; the answer will say so
                connection.send(request)
        name = type(request).__name__
        outcomes: dict[int, AnswerT | Failure] = {}
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(outcomes) < len(self._connections):
            waiting = {c: r for r, c in enumerate(self._connections) if r not in outcomes}
            ready = wait(list(waiting), timeout=1.0)
            for rank in [waiting[c] for c in ready if isinstance(c, Connection)]:
                try:
                    outcome = self._connections[rank].recv()
                except (EOFError, ConnectionError):
                    raise self._failure(f"rank {rank} ended in {name}") from None
                assert isinstance(outcome, (answers_with, Failure))
                outcomes[rank] = outcome
            if time.monotonic() > deadline:
                raise self._failure(f"ranks {sorted(waiting.values())} did not answer {name}")
        failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Failure)}
        if len(failures) == len(outcomes):
            raise StrategyError(failures[0].traceback.strip().splitlines()[-1])
        if failures:
            raise self._failure(f"{name} failed on some ranks: {failures}")
        answers = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, answers_with)}
        return [answers[rank] for rank in range(len(answers))]

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
        return JobError(self._job.result().explain(what))
