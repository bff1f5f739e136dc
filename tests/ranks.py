"""Real ranks for tests: processes that run one test after the other.

Every job gets a gloo process group of its own, of the size it asks for, and a timeout. A job is a function at
module level and its arguments; what it returns on each rank comes back as a list.

[Note: Templates]
To import torch takes more time than most jobs. So two processes, the templates, import what ranks need, and
ranks are forked from them, in turn. Two, and not one: each has hash seeds of its own, so ranks that do
something in the order of a set of strings still do it in different orders, as on a cluster. A template has no
threads and no process group, so a fork is a whole process. It runs nothing but one codec, once: where numba
runs its first kernel, it takes a quarter second. Whose jobs need more (a framework) lets the templates import
it first: twice, and not on every rank. And not in pytest, each worker of which imports all files of tests:
what only jobs need stands there below `if TYPE_CHECKING or on_a_rank()`.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from zeropp.tools.process_exit import advise_on_exit, describe_exit
from zeropp.tools.quick_import import import_quickly

HANG_SECONDS = 900.0
"""Limit for anything that takes seconds on a quiet machine: it ends a hang, and nothing that is only slow."""
GRACE_SECONDS = 60.0
LONGEST_BIRTH = 1 << 16
FAULT_LINES = 30
IMPORTED = (
    "torch._dynamo",  # FSDP2 imports it when it shards
    "torch.distributed.checkpoint",
    "zeropp.quant.cpu.launch",
    "zeropp.tools.train.loop",
    "tests.configs",
    "tests.training",
)


def on_a_rank() -> bool:
    """Whether this process is a rank or a template; see [Note: Templates]."""
    return multiprocessing.parent_process() is not None


class RankError(AssertionError):
    """A job raised on some rank, or did not finish in time."""


class Ranks:
    """A pool of `size` ranks, started at the first job and again after a job that had to be killed."""

    def __init__(
        self,
        size: int,
        folder: Path,
        backend: str = "gloo",
        prepare: Callable[[], None] | None = None,
        templates_of: Ranks | None = None,
    ) -> None:
        """`prepare` runs once in each rank, before its first process group; `templates_of` is a pool that
        outlives this one."""
        self.size = size
        self._folder = folder  # for rendezvous
        self._life = (backend, prepare, folder)
        self._imported = list(IMPORTED)
        self._owns_templates = templates_of is None
        self._templates: list[_Template] = [] if templates_of is None else templates_of._templates
        self._workers: list[_Worker] = []
        """By rank."""
        self._jobs = 0

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int = 4,
        timeout: float = HANG_SECONDS,
        env: dict[str, str] | None = None,
        grace: float = GRACE_SECONDS,
    ) -> list[Any]:
        """`function(*args)` on ranks 0 .. world - 1, inside a process group; the results by rank. After the
        first failure, the others have `grace` seconds to answer."""
        assert world <= self.size
        if not self._workers:
            self._start()
        self._jobs += 1
        store = self._folder / f"store-{self._jobs}"
        job = (function, args, world, str(store), timeout, env or {})
        for rank, worker in enumerate(self._workers[:world]):
            worker.connection.send((rank, *job))
        return self._collect(world, time.monotonic() + timeout, grace)

    def import_first(self, module: str) -> None:
        """Begin again, with ranks that start with this module; see [Note: Templates]."""
        self._kill()
        self._imported.append(module)

    def close(self) -> None:
        self._kill()
        if self._owns_templates:
            for template in self._templates:
                template.close()
            self._templates.clear()

    def _kill(self) -> None:
        for worker in self._workers:
            worker.connection.close()
            with suppress(ProcessLookupError):
                os.kill(worker.process, signal.SIGKILL)
        for worker in self._workers:
            worker.template.exit_code(worker.process)
        self._workers.clear()

    def _start(self) -> None:
        if not self._templates:
            self._templates += [_Template() for _ in range(2)]
        birth = pickle.dumps((self._imported, pickle.dumps(self._life)))
        templates = [self._templates[rank % 2] for rank in range(self.size)]
        connections = [template.fork(birth) for template in templates]
        self._workers = [
            _Worker(connection.recv(), connection, template)
            for connection, template in zip(connections, templates, strict=True)
        ]

    def _collect(self, world: int, deadline: float, grace: float) -> list[Any]:
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers[:world])}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    succeeded, outcome = pickle.loads(connection.recv_bytes())
                except EOFError:
                    succeeded, outcome = False, self._describe_death(rank)
                if succeeded:
                    results[rank] = outcome
                else:
                    failures[rank] = outcome
                    deadline = min(deadline, time.monotonic() + grace)  # the others may be stuck
        if waiting or failures:
            self._kill()  # whatever state the ranks are in, the next job starts with new ones
            late = f"no answer from ranks {sorted(waiting.values())}" if waiting else ""
            reports = [f"rank {rank}:\n{text}" for rank, text in sorted(failures.items())]
            raise RankError("\n".join([*reports, late]))
        return [results[rank] for rank in range(world)]

    def _describe_death(self, rank: int) -> str:
        """How the process of a rank ended, where it was, and what to try."""
        process, _, template = self._workers[rank]
        code = template.exit_code(process)
        where = _fault_file(self._folder, process).read_text().splitlines()[:FAULT_LINES]
        advice = advise_on_exit(code)
        lines = [f"rank {rank} {describe_exit(code)}", *where, *([f"Try: {advice}"] if advice else [])]
        return "\n".join(lines)


class _Worker(NamedTuple):
    process: int
    connection: Connection
    template: _Template


class _Template:
    """A process that ranks are forked from; see [Note: Templates]."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        # Else numpy's libraries, and those of Hugging Face's datasets, start threads when they are imported.
        os.environ |= {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_fork_ranks, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def fork(self, birth: bytes) -> Connection:
        """The line to a new rank, which first says its process number. `birth`: modules that it starts with,
        and, pickled, the arguments of `_serve`."""
        ours, theirs = socket.socketpair()
        socket.send_fds(self._control, [birth], [theirs.fileno()])
        theirs.close()
        return Connection(ours.detach())

    def close(self) -> None:
        self._control.close()
        self._process.join()

    def exit_code(self, process: int) -> int:
        """How a rank of this template ended (negative: by that signal). Waits until it has."""
        self._control.send(str(process).encode())
        return int(self._control.recv(LONGEST_BIRTH))


def _fork_ranks(control: socket.socket) -> None:
    """The life of a template."""
    codes: dict[int, int] = {}
    known = 0
    while True:
        message, (*lines,), _, _ = socket.recv_fds(control, LONGEST_BIRTH, maxfds=1)
        if not message:
            return
        if not lines:  # a question for the exit code of a rank
            process = int(message)
            if process not in codes:
                codes[process] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            control.send(str(codes[process]).encode())
            continue
        imported, life = pickle.loads(message)
        for module in imported:
            import_quickly(module)
        _run_a_kernel()
        assert len(os.listdir("/proc/self/task")) == 1, "a template with threads cannot be forked"
        known = _collect_garbage(known)
        if os.fork() == 0:
            control.close()
            _serve(Connection(lines[0]), *pickle.loads(life))
            os._exit(0)
        os.close(lines[0])


@cache
def _run_a_kernel() -> None:
    """See [Note: Templates]."""
    import torch

    from zeropp.quant import Segment, make_codec

    codec = make_codec("int8", torch.float32, [Segment(1, 128)])
    codec.encode(torch.zeros(1, 1), torch.empty(1, codec.row_bytes, dtype=torch.uint8))


def _collect_garbage(known: int) -> int:
    """And do not look again at what modules are made of, which takes a quarter second, if there are more than
    were known; returns how many there are."""
    gc.collect()
    if len(sys.modules) > known:
        gc.freeze()
    return len(sys.modules)


def _fault_file(folder: Path, process: int) -> Path:
    """Where faulthandler writes what a process was doing when a signal ended it."""
    return folder / f"fault-{process}"


def _serve(connection: Connection, backend: str, prepare: Callable[[], None] | None, folder: Path) -> None:
    """The life of one rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    faulthandler.enable(_fault_file(folder, os.getpid()).open("w"))
    connection.send(os.getpid())
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    known = len(sys.modules)
    while True:
        known = _collect_garbage(known)  # models of the last job, with their hooks
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
            dist.barrier()  # who is done at once must not close connections that others still wait for
            outcome = (True, function(*args))
            dist.destroy_process_group()
        except BaseException:
            outcome = (False, traceback.format_exc())
        for name, value in old.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        connection.send_bytes(pickle.dumps(outcome))
