"""Lanes: threads that send while the training thread computes, on a CPU, where there are no streams.

    training thread     compute 3   reduce 3 .  compute 2   wait 1 .  reduce 2 .  compute 1
    gathers' lane       ~ gather 2 ~            ~~ gather 1 ~~        ~~ gather 0 ~~
    reductions' lane                ~~~ reduce 3 ~~~                  ~~~ reduce 2 ~~~

[Note: Order in a lane]
A lane does one job after the other, in the order in which the training thread has given them, and a process
group belongs to one lane: nobody else starts messages in it (`Topology.hops` makes groups for each lane; what
FSDP2 passes is also the user's). FSDP2 gathers and reduces in the order of the program, which is the same on
all ranks. So ranks start the messages of every group in the same order, as if there were no lanes. A job
waits only for the same job of the same lane on its peers, never for the other lane or for a training thread:
the first job that not all ranks have finished can always go on, so there is no deadlock.

[Note: Life of a lane]
A lane's thread ends when there is no job left, and another one is started for the next. Whoever gives a job
waits for it before a step ends, so nothing runs when a process group is destroyed, after `remove()` or at
exit. After an error on the way the thread is a daemon: it holds nobody up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from threading import Event, Lock, Thread
from typing import Literal

import torch
import torch.distributed as dist

from ..labels import Collective, Label, labelled

Direction = Literal["gather", "reduce"]
COLLECTIVE: dict[Direction, Collective] = {"gather": "all_gather", "reduce": "reduce_scatter"}


class LaneWork(dist.Work):
    """A job of a lane; FSDP2 waits for it as for any collective."""

    def __init__(self, direction: Direction, unit: str, run: Callable[[], object]) -> None:
        super().__init__()
        self._direction: Direction = direction
        self._unit = unit
        self._run: Callable[[], object] | None = run
        self._is_inference = torch.is_inference_mode_enabled()
        self._done = Event()
        self._error: BaseException | None = None

    def do(self) -> None:
        """Run, in the lane's thread, with what is thread-local of whoever gave the job."""
        assert self._run is not None
        try:
            with torch.inference_mode(self._is_inference), torch.no_grad():
                self._run()
        except BaseException as error:
            self._error = error
        self._run = None  # and with it all tensors that it has used
        self._done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is done. An error in it is raised here, once."""
        with labelled(str(Label(COLLECTIVE[self._direction], "wait", self._unit))):
            self._done.wait()
        error, self._error = self._error, None
        if error is not None:
            where = f"{self._direction} of unit '{self._unit}'"
            error.add_note(f"in the {where}, beside the training thread")
            raise error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()


class Lane:
    """Runs jobs in their order, in a thread of its own; see [Note: Order in a lane]."""

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        self._jobs: deque[LaneWork] = deque()
        self._lock = Lock()
        self._has_thread = False

    def run(self, unit: str, run: Callable[[], object]) -> LaneWork:
        """Have `run` called after all that was given before."""
        work = LaneWork(self._direction, unit, run)
        with self._lock:
            self._jobs.append(work)
            if not self._has_thread:
                self._has_thread = True
                Thread(target=self._do_all, name=f"zeropp {self._direction}", daemon=True).start()
        return work

    def _do_all(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._has_thread = False
                    return
                work = self._jobs.popleft()
            work.do()


@cache  # one for all models of the process: they share process groups
def lane(direction: Direction) -> Lane:
    return Lane(direction)
