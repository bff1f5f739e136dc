"""The node shard (hpZ's secondary partition): the encoded weights that hop A left behind, and whether they
may be used again.

[Note: Freshness]
A rank that reuses its node shard skips a collective, so all ranks of a group must decide alike. They decide
on `fresh`, which changes only where all ranks do the same thing: a gather fills it; an optimizer step, a
state-dict load or `invalidate()` clears it. Never on the content of a tensor, which differs between ranks.

Weights changed in another way (under no_grad, through `p.data`, by a load straight into the tensors) would be
trained on stale. So each reuse compares a fingerprint of the rank's own shard with the one it was encoded
from. A mismatch is an error: raised at once on CPU; on devices with streams flagged on the device, without a
host synchronization, and raised by `raise_if_stale` at the next optimizer step of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .wire import empty_for_keeps

FINGERPRINT_LANES = 1021  # a prime, so that moved rows of a matrix land in other lanes


class StaleWeightsError(RuntimeError):
    """Weights changed without zeropp being told, while a node shard of the old ones was in use."""


class NodeShard:
    """Kept bytes of one unit, chunk by chunk, with the fingerprint of the shard they were encoded from."""

    def __init__(self, unit: str, *, check_on_host: bool | None = None) -> None:
        self.unit = unit
        self.fresh = False
        self.check_on_host = check_on_host
        """None: on CPU, where it costs nothing."""
        self.mismatch: Tensor | None = None
        """Whether a check has failed, on the device; None if there was none."""
        self._kept: dict[int, Tensor] = {}
        self._fingerprint: Tensor | None = None
        self._last_use: torch.Event | None = None

    @property
    def nbytes(self) -> int:
        return sum(kept.numel() for kept in self._kept.values())

    def buffer(self, chunk: int, rows: int, row_bytes: int, device: torch.device) -> Tensor:
        """The kept bytes of one chunk, [rows, row_bytes]."""
        kept = self._kept.get(chunk)
        if kept is None or kept.shape != (rows, row_bytes) or kept.device != device:
            kept = self._kept[chunk] = empty_for_keeps(rows * row_bytes, device).view(rows, row_bytes)
        return kept

    @contextmanager
    def in_use(self, device: torch.device) -> Iterator[None]:
        """Around each use: orders it after the last one, on whichever stream that was."""
        if self._last_use is not None:
            torch.accelerator.current_stream().wait_event(self._last_use)
        yield
        if device.type != "cpu":
            self._last_use = torch.accelerator.current_stream().record_event()

    def filled_from(self, source: Tensor) -> None:
        """The buffers now hold the encoded shard with this fingerprint, and its peers."""
        self._fingerprint = source
        self.fresh = True

    def check(self, shard: Tensor) -> None:
        """Compare `shard` with what the kept bytes were encoded from; see [Note: Freshness]."""
        assert self._fingerprint is not None
        self._fingerprint = self._fingerprint.to(shard.device)
        now = fingerprint(shard)
        mismatch = (
            torch.ones((), dtype=torch.bool, device=shard.device)
            if now.shape != self._fingerprint.shape
            else (now != self._fingerprint).any()
        )
        self.mismatch = mismatch if self.mismatch is None else self.mismatch | mismatch
        on_host = shard.device.type == "cpu" if self.check_on_host is None else self.check_on_host
        if on_host:
            raise_if_stale([self])

    def state_dict(self, row: int) -> dict[str, Any]:
        """For a checkpoint: one row of every chunk; other ranks have the others."""
        rows = [kept[row].clone() for _, kept in sorted(self._kept.items())]
        source = None if self._fingerprint is None else self._fingerprint.clone()
        return {"rows": rows, "fresh": self.fresh, "fingerprint": source}

    def load_state_dict(self, state: Mapping[str, Any]) -> dict[int, Tensor]:
        """The saved rows, by chunk; the caller puts them in place and fetches the others.

        They may be on another device than the model (`map_location`): each is moved when it is first used."""
        self.fresh, self._fingerprint = state["fresh"], state["fingerprint"]
        return dict(enumerate(state["rows"]))

    def invalidate(self) -> None:
        """The next gather sends the weights again. The memory is kept for it."""
        self.fresh = False

    def release(self) -> None:
        """Give up the memory. The next gather sends the weights again, and allocates anew."""
        self.invalidate()
        if self._last_use is not None:
            self._last_use.synchronize()  # a stream may still read what goes back to the allocator here
        self._kept, self._fingerprint, self._last_use = {}, None, None


def raise_if_stale(node_shards: Sequence[NodeShard]) -> None:
    """Raise if a check has failed since the last call. Reads from the device, once for all of them."""
    # Tensor subclasses (fake tensors of a dry run) have no value to read, and nothing there goes stale.
    checked = {shard.unit: shard.mismatch for shard in node_shards if type(shard.mismatch) is torch.Tensor}
    for shard in node_shards:
        shard.mismatch = None
    failed = torch.stack(list(checked.values())).tolist() if checked else []
    stale = [f"unit '{unit}'" for unit, mismatch in zip(checked, failed, strict=True) if mismatch]
    if stale:
        raise StaleWeightsError(
            f"the weights of {', '.join(stale)} changed since they were last sent, and zeropp was not told, "
            "so a gather would use the old ones. Optimizer steps and load_state_dict are noticed by "
            "themselves; after any other change to parameters (an edit under no_grad, p.data, a checkpoint "
            "loaded straight into the tensors) call invalidate() on every rank"
        )


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
