"""How a transfer runs. A comm describes one call as a `Transfer`; an `Execution` decides when and where it
runs.

    Inline         in the caller's thread, on the current stream
    SideStream     asynchronous calls on a separate stream of the device (side_stream.py)
    CommThread     on a CPU, in a thread (zeropp/cpu/comm_threads.py)

[Note: Pipelining]
A large buffer is cut into chunks ([Note: Chunks] in chunks.py). Each chunk runs through its hops as a
generator that yields while its data is on the wire. All chunks start, then advance in turns:

    chunk 0   encode          ~hop 1~  recode          ~~hop 2~~  decode
    chunk 1           encode  ~~~hop 1~~~      recode  ~~~~~hop 2~~~~~    decode

All ranks cut alike and advance chunks in the same order, so they start the collectives of every group in the
same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Transfer(ABC):
    """One call of a collective: an eager half, and a half that may run later and elsewhere."""

    unit: str
    """Name of the unit. Two transfers of one unit never run at the same time."""
    device: torch.device
    tensors: tuple[Tensor, ...] = ()
    """Memory of the caller that the transfer uses until it is complete."""
    reads_input_first = False
    """Whether the first step reads all input. The caller may free the input after that step."""

    @abstractmethod
    def prepare(self, slot: int) -> None:
        """Make all decisions that depend on the caller's state. Runs in the caller's thread.

        `slot` names scratch buffers: transfers that run at the same time have different slots.
        """

    @abstractmethod
    def steps(self) -> Generator[None]:
        """Run the hops. Yields wherever the next step waits for the wire."""


class Execution(Protocol):
    """Runs transfers in the order in which they are submitted."""

    def submit(self, transfer: Transfer, *, async_op: bool) -> dist.Work | None:
        """Run a transfer. None: it is complete, or ordered on the current stream."""


class Inline:
    """Runs a transfer before `submit` returns."""

    def submit(self, transfer: Transfer, *, async_op: bool = False) -> dist.Work | None:
        transfer.prepare(slot=0)
        run_to_end(transfer.steps())
        return None


class DiscardableWork(dist.Work):
    """Work whose result may become useless before it is complete."""

    def discard(self) -> None:
        """From now on, an error in the transfer is logged and not raised: nobody uses the result."""


class Comm:
    """A collective of one unit, in the place of FSDP2's."""

    owner: Any = None
    """The `ZeroPP` that installed the comm. The reference keeps it alive as long as the model."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


def pipelined(chunks: Iterable[Generator[None]]) -> Generator[None]:
    """Run all chunks; see [Note: Pipelining]. Yields when every chunk waits for the wire."""
    active = [chunk for chunk in chunks if _advance(chunk)]
    while active:
        for chunk in active[:]:
            yield
            if not _advance(chunk):
                active.remove(chunk)


def run_to_end(steps: Generator[None]) -> None:
    """Run all steps, and wait wherever they wait."""
    for _ in steps:
        pass


def _advance(chunk: Generator[None]) -> bool:
    """Run one step. False: it was the last one."""
    try:
        next(chunk)
    except StopIteration:
        return False
    return True
