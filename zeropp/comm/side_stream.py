"""A separate stream for asynchronous gathers, on devices with streams.

With `unshard(async_op=True)`, FSDP2 calls a gather on the stream that computes, and waits for the returned
work just before it uses the weights. Hops on that stream would delay everything computed in between. So they
run on a separate stream, and the stream that waits is ordered after it. The host never waits.

[Note: Memory of two streams]
Memory that a gather allocates belongs to its own stream and is used on no other. Output and input belong to
the caller's stream. The work holds them until a stream is ordered after it: otherwise the allocator could
give them to another tensor while hops still write to them. A work that is dropped without a wait must be held
as long: `AllGather` holds its last work until the next gather.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from .execution import Inline, Transfer

HIGH_PRIORITY = -1  # like FSDP2's own stream for gathers


class SideStream(Inline):
    """Runs synchronous calls inline, and asynchronous calls on a separate stream."""

    def submit(self, transfer: Transfer, *, async_op: bool = False) -> dist.Work | None:
        if not async_op:
            return super().submit(transfer)
        side = _side_stream(transfer.device)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            super().submit(transfer)
            done = side.record_event()
        return StreamWork(done, transfer.tensors)


class StreamWork(dist.Work):
    """A transfer on another stream."""

    def __init__(self, done: torch.Event, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._done = done
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream after the transfer. Returns at once, like NCCL's work."""
        torch.accelerator.current_stream().wait_event(self._done)
        self._tensors = ()  # see [Note: Memory of two streams]
        return True

    def is_completed(self) -> bool:
        return self._done.query()


@cache  # one for all units: their hops run in one order, as on FSDP2's own stream
def _side_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device, priority=HIGH_PRIORITY)
