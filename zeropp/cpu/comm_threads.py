"""Lanes: threads that send while the training thread computes, on a CPU, where there are no streams.

    training thread     compute 3   reduce 3 .  compute 2   wait 1 .  reduce 2 .  compute 1
    gathers' lane       ~ gather 2 ~            ~~ gather 1 ~~        ~~ gather 0 ~~
    reductions' lane                ~~~ reduce 3 ~~~                  ~~~ reduce 2 ~~~

[Note: Order in a lane]
A lane does jobs in the order in which the training thread has given them, and a process group belongs to one
lane: nobody else starts messages in it (`Topology.hops` makes groups for each lane; what FSDP2 passes is also
the user's). FSDP2 gathers and reduces in the order of the program, which is the same on all ranks.

The next job is started before the one at work is over, so that the link does not stand still in between:

    gather 2    encode ~~ across ~~  ~ in-node ~  decode
    gather 1            encode   ~~~~~~~ across ~~~~~~~  ~ in-node ~  decode

When it is started depends on the moment, so hops of two jobs may be in another order on another rank. Their
messages have tags of their own, by the unit's name (`tag_of`), so that no order between them is needed; two
jobs of one unit are never at work together. A lane waits only in its oldest job, and a job only for the same
one on its peers, never for the other lane or for a training thread. The oldest job that not all ranks have
finished has been started wherever it was given, and is where its ranks wait: it can always go on, so there is
no deadlock.

[Note: Life of a lane]
A lane's thread ends when there is no job left, and another one is started for the next. Whoever gives a job
waits for it before a step ends, so nothing runs when a process group is destroyed, after `remove()` or at
exit. After an error jobs may be on their way. They end by themselves: what they wait for, the others send
before they come to wait for this rank. So the exit waits a little for them, because a thread that comes back
from gloo while Python ends takes the process down with SIGABRT, in the place of the error's own exit code. It
is a daemon all the same: it holds nobody up for longer. For the same reason the exit waits for a thread that
has no job left but has not ended: the last work goes with it, and torch lets go of the interpreter meanwhile.
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
from zlib import crc32

import torch
import torch.distributed as dist

from ..comm.profiler_labels import Collective, Label, labelled

logger = logging.getLogger("zeropp")

Direction = Literal["gather", "reduce"]
COLLECTIVE: dict[Direction, Collective] = {"gather": "all_gather", "reduce": "reduce_scatter"}
MAX_JOBS = 2
"""How many a lane has on the wire at a time."""
LAST_SECONDS = 5.0
"""How long the exit of a process waits for jobs on their way; see [Note: Life of a lane]."""

Job = Callable[[int], Generator[None]]
"""Is called at once; what it returns is run in the lane, and yields where it would have to wait for the wire.
It gets a slot for its buffers: a number below `MAX_JOBS` that no other job has while it is at work. (Another
rank may have another one: its lane may serve models that are not here.)"""

CHUNK_BITS = 10  # of the 31 of a tag


def tag_of(unit: str, chunk: int = 0) -> int:
    """Tag of the messages of a chunk. Units that have the same by chance take turns, as if they were one."""
    return crc32(unit.encode()) >> (CHUNK_BITS + 1) << CHUNK_BITS | chunk % (1 << CHUNK_BITS)


class ThreadWork(dist.Work):
    """A job of a lane; FSDP2 waits for it as for any collective."""

    def __init__(
        self,
        direction: Direction,
        unit: str,
        job: Job,
        slot: int,
        reads_first: bool,
        on_error: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self._direction: Direction = direction
        self._unit = unit
        self._slot = slot
        self._rest: Generator[None] | None = job(slot)
        self._reads_first = reads_first
        self._read = Event()
        self._is_inference = torch.is_inference_mode_enabled()
        self._done = Event()
        self._error: BaseException | None = None
        self._on_error = on_error
        self._is_given_up = False

    def advance(self) -> None:
        """Go on to where it has to wait next, in the lane's thread, with what is thread-local of whoever gave
        the job."""
        assert self._rest is not None
        try:
            with torch.inference_mode(self._is_inference), torch.no_grad():
                next(self._rest)
            if self._reads_first:
                self._read.set()
            return
        except StopIteration:
            pass
        except BaseException as error:
            self._error = error
        self._rest = None  # and with it all tensors that it has used
        self._read.set()
        self._done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is done. An error in it is raised here, once."""
        self._wait_for(self._done)
        error, self._error = self._error, None
        if error is not None:
            where = f"{self._direction} of unit '{self._unit}'"
            if self._is_given_up:
                logger.debug("zeropp: in a %s that was given up: %s", where, error)
                return True
            error.add_note(f"in the {where}, beside the training thread")
            if self._on_error is not None:
                self._on_error()
            raise error
        return True

    def give_up(self) -> None:
        """Nobody wants what it brings any more, so an error in it is none."""
        self._is_given_up = True

    def wait_until_read(self) -> None:
        """Until the job needs what it was given to send no more."""
        self._wait_for(self._read)

    def _wait_for(self, event: Event) -> None:
        with labelled(str(Label(COLLECTIVE[self._direction], "wait", self._unit))):
            event.wait()

    def is_read(self) -> bool:
        return self._read.is_set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def may_run_beside(self, other: ThreadWork) -> bool:
        """Whether the two have buffers and messages of their own."""
        return self._slot != other._slot and tag_of(self._unit) != tag_of(other._unit)


class CommThread:
    """Runs jobs in their order, in a thread of its own; see [Note: Order in a lane]."""

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        self._given: deque[ThreadWork] = deque()
        """Not started yet."""
        self._count = 0
        self._lock = Lock()
        self._thread: Thread | None = None
        """The last that was started; it may have ended."""
        self._is_running = False
        """Whether it will look for jobs again."""

    def run(
        self,
        unit: str,
        job: Job,
        *,
        reads_first: bool = False,
        on_error: Callable[[], None] | None = None,
    ) -> ThreadWork:
        """Have `job` done after all that was given before. reads_first: before it yields for the first time,
        it has read all that it sends, and needs it no more. on_error: called before an error is raised in
        whoever waits."""
        with self._lock:
            slot = self._count % MAX_JOBS
            work = ThreadWork(self._direction, unit, job, slot, reads_first, on_error)
            self._count += 1
            self._given.append(work)
            if not self._is_running:
                self._is_running = True
                self._thread = Thread(target=self._do_all, name=f"zeropp {self._direction}", daemon=True)
                self._thread.start()
        return work

    def finish(self) -> None:
        """Wait a little for what is on its way; see [Note: Life of a lane]."""
        if self._thread is not None:
            self._thread.join(LAST_SECONDS)

    def _do_all(self) -> None:
        """Start what is given, or else go on with the oldest."""
        at_work: deque[ThreadWork] = deque()
        while True:
            with self._lock:
                if self._given and all(map(self._given[0].may_run_beside, at_work)):
                    at_work.append(self._given.popleft())
                    work = at_work[-1]
                elif at_work:
                    work = at_work[0]
                else:
                    self._is_running = False
                    return
            work.advance()
            if work.is_completed():
                at_work.remove(work)


@cache  # one for all models of the process: they share process groups
def lane(direction: Direction) -> CommThread:
    made = CommThread(direction)
    atexit.register(made.finish)
    return made
