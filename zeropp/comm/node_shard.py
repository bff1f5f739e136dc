"""The node shard (hpZ's secondary partition): the encoded weights that hop A received, and whether the next
gather may reuse them.

[Note: Freshness]
A rank that reuses its node shard skips a collective, so all ranks of a group must decide alike. They decide
on `state`, which changes only in events that are the same on all ranks: a gather, an optimizer step, a
state-dict load, an operation on a parameter, `invalidate()`. The content of a tensor never decides: it
differs between ranks.

    EMPTY --gather--> FRESH --optimizer step--> BEHIND --gather--> FRESH
    any state --invalidate(), state-dict load, operation on a parameter--> EMPTY

A node shard that is BEHIND still serves as the reference of differences: [Note: Full sends] in
delta_weights.py.

An operation on a parameter changes its version: [Note: Operations on parameters] in fsdp2/units.py. It may
change the parameter more than an optimizer step does, so the next gather sends weights, not a difference.

Other changes of weights (through `p.data` or `p.to_local()`, or by a load into the local tensors) change
neither state nor version, and training would continue on the old weights. So each reuse compares a
fingerprint of the rank's own shard with the fingerprint at the time of encoding. A mismatch is an error. It
is raised at once on CPU, and without waiting on devices with streams: [Note: No waiting] in stale_weights.py.
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

FINGERPRINT_LANES = 1021  # a prime, so that moved rows of a matrix are summed into other words


class State(Enum):
    """Meaning of the stored bytes."""

    EMPTY = "of no use"
    BEHIND = "the weights before the last step"
    FRESH = "the weights"


class Send(Enum):
    """What the first hop of a gather sends."""

    NOTHING = "the node shard is used again"
    DIFFERENCE = "what changed since the last time"
    WEIGHTS = "the weights"


class Before(NamedTuple):
    """State that an early gather overwrites: [Note: Gathered and not used] in cpu/prefetch.py."""

    state: State
    fingerprint: Tensor | None
    differences: int
    reference: dict[int, Tensor]
    """Copies of the reference by chunk. Empty unless the gather adds a difference to it."""


class NodeShard:
    """The node shard of one column group: encoded bytes by chunk, and a fingerprint of the rank's shard.

    This class alone decides whether the bytes are fresh. Code that changes weights calls `weights_changed` or
    `invalidate`.
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
        """Number of differences sent since the last full send."""
        self._weights_version = weights_version
        """Returns another value after every operation on the weights that all ranks run alike."""
        self._told_version = weights_version()
        self._kept: dict[int, Tensor] = {}
        self._fingerprint: Tensor | None = None
        self._last_use: torch.Event | None = None
        self._before: Before | None = None
        """State before the last gather, if it was early and no forward has used it. None: nothing to undo."""

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(kept.numel() for kept in self._kept.values())

    def buffer(self, chunk: int, rows: int, row_bytes: int, device: torch.device) -> Tensor:
        """Return the bytes of one chunk, [rows, row_bytes]. Allocates them at first use."""
        kept = self._kept.get(chunk)
        if kept is None or kept.shape != (rows, row_bytes) or kept.device != device:
            kept = self._kept[chunk] = empty_outside_inference(rows * row_bytes, device).view(rows, row_bytes)
        return kept

    @contextmanager
    def in_use(self, device: torch.device) -> Iterator[None]:
        """Context of each use: orders it after the last use, which may be on another stream."""
        if self._last_use is not None:
            torch.accelerator.current_stream().wait_event(self._last_use)
        yield
        if device.type != "cpu":
            self._last_use = torch.accelerator.current_stream().record_event()

    @property
    def next_send(self) -> Send:
        """Data that the next gather sends over the first hop, alike on all ranks; see [Note: Freshness]."""
        if self.state is State.FRESH:
            return Send.NOTHING
        is_due = self.refresh_every and self.differences >= self.refresh_every
        if self.takes_differences and self.state is State.BEHIND and not is_due:
            return Send.DIFFERENCE
        return Send.WEIGHTS

    def prepare(self, is_early: bool, device: torch.device) -> None:
        """Prepare a gather. is_early: no forward uses the weights yet, and perhaps none will."""
        self._notice_operations()
        send = self.next_send
        if send is Send.NOTHING:
            return  # the gather changes no state
        reference: dict[int, Tensor] = {}
        if is_early and send is Send.DIFFERENCE:
            with self.in_use(device):
                reference = {chunk: kept.clone() for chunk, kept in self._kept.items()}
        before = Before(self.state, self._fingerprint, self.differences, reference)
        self._before = before if is_early else None

    def used(self) -> None:
        """A forward uses the weights of the last gather: it cannot be undone from now on."""
        self._before = None

    def undo_unused(self) -> None:
        """Restore the state before the last gather, if it was early and no forward has used it."""
        if self._before is not None:
            before, self._before = self._before, None
            self.state, self._fingerprint, self.differences, reference = before
            for chunk, kept in reference.items():
                self._kept[chunk].copy_(kept)

    def gathered(self, sent: Send, source: Tensor) -> None:
        """Record a gather that has sent `sent`: the buffers hold the current weights.

        Args:
            source: fingerprint of this rank's shard at the time of encoding.
        """
        self._fingerprint = source
        self.differences = self.differences + 1 if sent is Send.DIFFERENCE else 0
        self.state = State.FRESH

    def _notice_operations(self) -> None:
        """Invalidate if an operation has changed the weights since the last event; see [Note: Freshness]."""
        if self._weights_version() != self._told_version:
            logger.debug("zeropp: unit %s was changed in place, and is sent anew", self.unit)
            self.invalidate()

    def check(self, shard: Tensor, alarm: Alarm) -> None:
        """Report to the alarm whether `shard` has changed since it was encoded; see [Note: Freshness]."""
        assert self._fingerprint is not None
        self._fingerprint = self._fingerprint.to(shard.device)  # a checkpoint may be loaded to any device
        now = fingerprint(shard)
        mismatch = (
            torch.ones((), dtype=torch.bool, device=shard.device)
            if now.shape != self._fingerprint.shape
            else (now != self._fingerprint).any()
        )
        alarm.report(self.unit, mismatch)

    def state_dict(self, row: int) -> dict[str, Any]:
        """Return the state for a checkpoint: this rank's row of every chunk. Its rail saves the other rows.

        Empty if there is no reference of differences: all else can be rebuilt from the weights.
        """
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
        """Continue from `state`. The caller has restored the rows already."""
        self.differences = int(state["differences"])
        self._fingerprint = state["fingerprint"]
        self.state = State.FRESH if state["is_fresh"] else State.BEHIND

    def weights_changed(self) -> None:
        """An optimizer has changed the weights: the next gather sends them or a difference. Frees nothing."""
        self._told_version = self._weights_version()
        if self.state is State.FRESH:
            self.state = State.BEHIND

    def invalidate(self) -> None:
        """The weights have changed in any way: the next gather sends all of them. Frees nothing."""
        self._told_version = self._weights_version()
        self.state = State.EMPTY
        self._before = None

    def release(self) -> None:
        """Free the memory. The next gather allocates it again, and sends the weights."""
        self.invalidate()
        if self._last_use is not None:
            self._last_use.synchronize()  # a stream may still read the memory
        self._kept, self._fingerprint, self._last_use = {}, None, None


def fingerprint(shard: Tensor) -> Tensor:
    """Return a short vector of bytes that changes when `shard` does, at half the cost of a copy.

    The 64-bit words of the shard, as a matrix [rows, FINGERPRINT_LANES], are summed over rows modulo 2^64.
    Bytes before the first aligned word and after the last full row are copied.

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
