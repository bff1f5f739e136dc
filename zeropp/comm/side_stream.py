"""Work beside the current stream: what `unshard(async_op=True)` gets on a device with streams.

FSDP2 then calls a gather on the stream that computes, and waits for what the call returns just before it uses
the weights. Hops on that stream would hold up all that is computed in between, so they run on a stream of
their own, and the stream that waits comes after it: no host waits for anything.

[Note: Memory of two streams]
What a gather allocates on the way belongs to its own stream, and is used nowhere else. Output and input
belong to the caller's: the work keeps them until some stream has been ordered after it, so that they cannot
be given back, and to another tensor, while hops still write to them. Whoever drops a work without waiting
must keep them so long, too: `AllGather` keeps its last work until the next gather.

On a CPU there are no streams, and cpu/comm_threads.py has threads instead.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

HIGH_PRIORITY = -1  # as FSDP2's own stream for gathers


class StreamWork(dist.Work):
    """Work that was put on another stream."""

    def __init__(self, done: torch.Event, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._done = done
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream after the work. Returns at once, as NCCL's does."""
        torch.accelerator.current_stream().wait_event(self._done)
        self._tensors = ()  # see [Note: Memory of two streams]
        return True

    def is_completed(self) -> bool:
        return self._done.query()


def run_beside(device: torch.device, run: Callable[[], None], tensors: tuple[Tensor, ...]) -> StreamWork:
    """Run on a stream of its own, after all that the current one has been given; `tensors` are used there."""
    side = _side_stream(device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        run()
        done = side.record_event()
    return StreamWork(done, tensors)


@cache  # one for all units: their hops are in one order, as on FSDP2's own stream
def _side_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device, priority=HIGH_PRIORITY)
