"""Threads that send while the training thread computes. A CPU with gloo has no streams that could do it.

    training thread     compute 3   reduce 3 .  compute 2   wait 1 .  reduce 2 .  compute 1
    gather thread       ~ gather 2 ~            ~~ gather 1 ~~        ~~ gather 0 ~~
    reduce thread                   ~~~ reduce 3 ~~~                  ~~~ reduce 2 ~~~

[Note: Order in a thread]
A comm thread runs transfers in the order in which the training thread submits them. A process group belongs
to one comm thread, and no other thread starts messages in it (`Topology.hops` makes groups for each thread;
the group that FSDP2 passes also serves the user). FSDP2 gathers and reduces in the order of the program,
which is the same on all ranks.

The next transfer starts before the running one ends, so that the link does not idle in between:

    gather 2    encode ~~ across ~~  ~ in-node ~  decode
    gather 1            encode   ~~~~~~~ across ~~~~~~~  ~ in-node ~  decode

The moment of its start differs between ranks, so hops of two transfers may run in different orders on two
ranks. Messages carry tags made of the unit's name (`tag_of`), so this order does not matter. Two transfers of
one unit never run at the same time.

No deadlock: each rank blocks only in its oldest unfinished transfer, and only for the same transfer on its
peers, never for the other thread or for a training thread. The globally oldest transfer has started on every
rank, so it completes.

[Note: Life of a thread]
A comm thread ends when it has no transfer left; the next transfer starts another one. The submitter of a
transfer waits for it before the step ends, so nothing runs when a process group is destroyed, after
`remove()` or at exit. After an error, transfers may still run. They complete: the other ranks send what they
need before they wait for this rank. The exit waits up to half a minute for them, because a thread that
returns from gloo while Python finalizes ends the process with SIGABRT instead of the error's exit code. The
thread is a daemon, so the exit waits no longer. For the same reason the exit waits for a thread that has no
transfer left but has not ended: it frees the last work, and torch releases the interpreter lock meanwhile.
"""

from __future__ import annotations

import atexit
import logging
from collections import deque
from collections.abc import Callable, Generator
from datetime import timedelta
from functools import cache
from threading import Event, Lock, Thread
from typing import Literal

import torch

from ..comm.execution import DiscardableWork, Transfer
from ..comm.profiler_labels import Collective, Label, labelled
from ..comm.wire import tag_of

logger = logging.getLogger("zeropp")

Direction = Literal["gather", "reduce"]
COLLECTIVE: dict[Direction, Collective] = {"gather": "all_gather", "reduce": "reduce_scatter"}
MAX_TRANSFERS = 2
"""Transfers of one thread that run at the same time."""
EXIT_SECONDS = 30.0
"""How long the exit of a process waits for transfers; see [Note: Life of a thread]."""


class ThreadWork(DiscardableWork):
    """A transfer of a comm thread. FSDP2 waits for it like for any collective."""

    def __init__(self, direction: Direction, transfer: Transfer, slot: int) -> None:
        super().__init__()
        self.unit = transfer.unit
        self.before_raise: Callable[[], None] | None = None
        """Called in the thread that waits, before it raises an error of the transfer."""
        self._direction: Direction = direction
        self._slot = slot
        self._steps: Generator[None] | None = transfer.steps()
        self._reads_first = transfer.reads_input_first
        self._read = Event()
        self._is_inference = torch.is_inference_mode_enabled()
        self._done = Event()
        self._error: BaseException | None = None
        self._is_discarded = False

    def advance(self) -> None:
        """Run to the next wait, in the comm thread, with the thread-local modes of the submitting thread."""
        assert self._steps is not None
        try:
            with torch.inference_mode(self._is_inference), torch.no_grad():
                next(self._steps)
            if self._reads_first:
                self._read.set()
            return
        except StopIteration:
            pass
        except BaseException as error:
            self._error = error
        self._steps = None  # frees all tensors of the transfer
        self._read.set()
        self._done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the transfer is complete. Raises its error, once."""
        self._wait_for(self._done)
        error, self._error = self._error, None
        if error is not None:
            where = f"{self._direction} of unit '{self.unit}'"
            if self._is_discarded:
                logger.debug("zeropp: error in a discarded %s: %s", where, error)
                return True
            error.add_note(f"in the {where}, in a comm thread")
            if self.before_raise is not None:
                self.before_raise()
            raise error
        return True

    def discard(self) -> None:
        self._is_discarded = True

    def wait_until_read(self) -> None:
        """Wait until the transfer has read its input."""
        self._wait_for(self._read)

    def _wait_for(self, event: Event) -> None:
        with labelled(str(Label(COLLECTIVE[self._direction], "wait", self.unit))):
            event.wait()

    def is_read(self) -> bool:
        return self._read.is_set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def may_run_with(self, other: ThreadWork) -> bool:
        """Whether the two use different buffers and different tags."""
        return self._slot != other._slot and tag_of(self.unit) != tag_of(other.unit)


class CommThread:
    """An `Execution` in a thread; see [Note: Order in a thread]."""

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        self._submitted: deque[ThreadWork] = deque()
        """Not started yet."""
        self._count = 0
        self._lock = Lock()
        self._thread: Thread | None = None
        """The last thread that was started; it may have ended."""
        self._is_running = False
        """Whether the thread will look for transfers again."""

    def submit(self, transfer: Transfer, *, async_op: bool = True) -> ThreadWork:
        """Run a transfer after all that were submitted before. Always asynchronous."""
        with self._lock:
            slot = self._count % MAX_TRANSFERS
            self._count += 1
        transfer.prepare(slot)
        work = ThreadWork(self._direction, transfer, slot)
        with self._lock:
            self._submitted.append(work)
            if not self._is_running:
                self._is_running = True
                self._thread = Thread(target=self._run, name=f"zeropp {self._direction}", daemon=True)
                self._thread.start()
        return work

    def join(self) -> None:
        """Wait for transfers, up to `EXIT_SECONDS`; see [Note: Life of a thread]."""
        if self._thread is not None:
            self._thread.join(EXIT_SECONDS)

    def _run(self) -> None:
        """Start submitted transfers, else advance the oldest one."""
        running: deque[ThreadWork] = deque()
        while True:
            with self._lock:
                if self._submitted and all(map(self._submitted[0].may_run_with, running)):
                    running.append(self._submitted.popleft())
                    work = running[-1]
                elif running:
                    work = running[0]
                else:
                    self._is_running = False
                    return
            work.advance()
            if work.is_completed():
                running.remove(work)


@cache  # one for all models of the process: they share process groups
def comm_thread(direction: Direction) -> CommThread:
    made = CommThread(direction)
    atexit.register(made.join)
    return made
