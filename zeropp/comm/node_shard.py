"""The node shard (hpZ's secondary partition): the encoded weights that hop A left behind, and whether they
may be used again.

[Note: Freshness]
A rank that reuses its node shard skips a collective, so all ranks of a group must decide alike. They decide
on `state`, which changes only where all ranks do the same thing: a gather fills it; an optimizer step, a
state-dict load, an operation on a parameter or `invalidate()` clears it. Never on the content of a tensor,
which differs between ranks.

    EMPTY --gather--> FRESH --optimizer step--> BEHIND --gather--> FRESH
    any state --invalidate(), state-dict load, operation on a parameter--> EMPTY

What is BEHIND still serves as the reference of differences: [Note: Full sends] in delta_weights.py.

Operations on a parameter itself are seen by its version: [Note: Operations on parameters] in fsdp2/units.py.
They are no optimizer's steps, and may change all of it, so no difference is sent.

Weights changed in another way (through `p.data` or `p.to_local()`, by a load straight into the tensors) would
be trained on stale. So each reuse compares a fingerprint of the rank's own shard with the one it was encoded
from. A mismatch is an error: raised at once on CPU, as soon as the device has told on devices with streams:
[Note: No waiting] in stale_weights.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .stale_weights import Alarm
from .wire import empty_outside_inference

logger = logging.getLogger("zeropp")

FINGERPRINT_LANES = 1021  # a prime, so that moved rows of a matrix land in other lanes


class State(Enum):
    """What the kept bytes are."""

    EMPTY = "of no use"
    BEHIND = "the weights before the last step"
    FRESH = "the weights"


class Send(Enum):
    """What the first hop of a gather sends."""

    NOTHING = "the node shard is used again"
    DIFFERENCE = "what changed since the last time"
    WEIGHTS = "the weights"


class Before(NamedTuple):
    """What an early gather overwrites: [Note: Gathered and not used] in cpu/overlap.py."""

    state: State
    fingerprint: Tensor | None
    differences: int
    reference: dict[int, Tensor]
    """Copies of the reference; empty unless a difference is added to it."""


class NodeShard:
    """Kept bytes of one unit, chunk by chunk, with the fingerprint of the shard they were encoded from.

    The one owner of what is known about them: who else wants to know asks, who changes weights tells.
    """

    def __init__(
        self,
        unit: str,
        *,
        takes_differences: bool = False,
        refresh_every: int = 0,
        weights_version: Callable[[], object] = lambda: None,
    ) -> None:
        self.unit = unit
        self.state = State.EMPTY
        self.takes_differences = takes_differences
        self.refresh_every = refresh_every
        self.differences = 0
        """Sent since the weights were."""
        self._weights_version = weights_version
        """Another one after every operation on the weights that all ranks run alike."""
        self._told_version = weights_version()
        self._kept: dict[int, Tensor] = {}
        self._fingerprint: Tensor | None = None
        self._last_use: torch.Event | None = None
        self._before: Before | None = None
        """None: what is kept was used, or was filled for a use."""

    @property
    def nbytes(self) -> int:
        return sum(kept.numel() for kept in self._kept.values())

    def buffer(self, chunk: int, rows: int, row_bytes: int, device: torch.device) -> Tensor:
        """The kept bytes of one chunk, [rows, row_bytes]."""
        kept = self._kept.get(chunk)
        if kept is None or kept.shape != (rows, row_bytes) or kept.device != device:
            kept = self._kept[chunk] = empty_outside_inference(rows * row_bytes, device).view(rows, row_bytes)
        return kept

    @contextmanager
    def in_use(self, device: torch.device) -> Iterator[None]:
        """Around each use: orders it after the last one, on whichever stream that was."""
        if self._last_use is not None:
            torch.accelerator.current_stream().wait_event(self._last_use)
        yield
        if device.type != "cpu":
            self._last_use = torch.accelerator.current_stream().record_event()

    @property
    def next_send(self) -> Send:
        """What the next gather sends over the first hop: the same on every rank, see [Note: Freshness]."""
        if self.state is State.FRESH:
            return Send.NOTHING
        is_due = self.refresh_every and self.differences >= self.refresh_every
        if self.takes_differences and self.state is State.BEHIND and not is_due:
            return Send.DIFFERENCE
        return Send.WEIGHTS

    def prepare(self, is_early: bool, device: torch.device) -> None:
        """Before each gather. is_early: no forward has asked for the weights yet, and perhaps none will."""
        self._notice_operations()
        send = self.next_send
        if send is Send.NOTHING:
            return
        reference: dict[int, Tensor] = {}
        if is_early and send is Send.DIFFERENCE:
            with self.in_use(device):
                reference = {chunk: kept.clone() for chunk, kept in self._kept.items()}
        before = Before(self.state, self._fingerprint, self.differences, reference)
        self._before = before if is_early else None

    def used(self) -> None:
        """The weights of the last gather are computed with."""
        self._before = None

    def undo_unused(self) -> None:
        """Go back to before the last gather, if it was early and nobody has used it."""
        if self._before is not None:
            before, self._before = self._before, None
            self.state, self._fingerprint, self.differences, reference = before
            for chunk, kept in reference.items():
                self._kept[chunk].copy_(kept)

    def gathered(self, sent: Send, source: Tensor) -> None:
        """A gather has sent `sent`: the buffers hold the encoded shard with the fingerprint `source`, and
        those of its peers."""
        self._fingerprint = source
        self.differences = self.differences + 1 if sent is Send.DIFFERENCE else 0
        self.state = State.FRESH

    def _notice_operations(self) -> None:
        """Before a gather: weights may have been operated on without a word; see [Note: Freshness]."""
        if self._weights_version() != self._told_version:
            logger.debug("zeropp: unit %s was changed in place, and is sent anew", self.unit)
            self.invalidate()

    def check(self, shard: Tensor, alarm: Alarm) -> None:
        """Compare `shard` with what the kept bytes were encoded from; see [Note: Freshness]."""
        assert self._fingerprint is not None
        self._fingerprint = self._fingerprint.to(shard.device)
        now = fingerprint(shard)
        mismatch = (
            torch.ones((), dtype=torch.bool, device=shard.device)
            if now.shape != self._fingerprint.shape
            else (now != self._fingerprint).any()
        )
        alarm.report(self.unit, mismatch)

    def state_dict(self, row: int) -> dict[str, Any]:
        """For a checkpoint: one row of every chunk. The other ranks of the rail save the others. Only
        differences have a history."""
        if not self.takes_differences or self.state is State.EMPTY:
            return {}
        assert self._fingerprint is not None
        return {
            "rows": [kept[row].clone() for _, kept in sorted(self._kept.items())],
            "is_fresh": self.state is State.FRESH,
            "fingerprint": self._fingerprint.clone(),
            "differences": self.differences,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; its rows are in the buffers already."""
        self.differences = int(state["differences"])
        self._fingerprint = state["fingerprint"]
        self.state = State.FRESH if state["is_fresh"] else State.BEHIND

    def weights_changed(self) -> None:
        """The next gather sends the weights again, or what changed. The memory is kept for it."""
        self._told_version = self._weights_version()
        if self.state is State.FRESH:
            self.state = State.BEHIND

    def invalidate(self) -> None:
        """The weights are others now: the next gather sends all of them. The memory is kept for it."""
        self._told_version = self._weights_version()
        self.state = State.EMPTY
        self._before = None

    def release(self) -> None:
        """Give up the memory. The next gather sends the weights again, and allocates anew."""
        self.invalidate()
        if self._last_use is not None:
            self._last_use.synchronize()  # a stream may still read what goes back to the allocator here
        self._kept, self._fingerprint, self._last_use = {}, None, None


def fingerprint(shard: Tensor) -> Tensor:
    """A short vector of bytes that changes when `shard` does; half the cost of a copy.

    The shard as 64-bit words, [rows, lanes], summed (modulo 2^64) over rows; what does not fill a row, or
    lies before the first aligned word, is kept as it is.

    >>> x = torch.randn(5000)
    >>> before = fingerprint(x)
    >>> x[1234] += 1e-3
    >>> bool((fingerprint(x) == before).all())
    False
    """
    raw = shard.contiguous().view(torch.uint8)
    head = min(-raw.storage_offset() % 8, raw.numel())
    row = 8 * FINGERPRINT_LANES
    body = (raw.numel() - head) // row * row
    if body == 0:
        return raw.clone()
    lanes = raw[head : head + body].view(torch.int64).view(-1, FINGERPRINT_LANES).sum(0)
    return torch.cat([lanes.view(torch.uint8), raw[:head], raw[head + body :]])
