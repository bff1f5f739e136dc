"""Errors for stale weights. A device finds them, and the host raises without waiting for the device.

[Note: No waiting]
A check runs on the device of the weights. On CPU its result is available at once. On a device with streams,
each read of a result would block the host until the device has caught up, in every gather. So the stream of
the check also runs:

    add the result to the unit's count of failed checks
    copy the count to pinned memory of the host
    record an event

Every gather, reduction and optimizer step queries the oldest pending event. If it is complete, the host reads
its copy. So the error is raised some calls after the stale gather: as many calls as the host is ahead of the
device. While a copy of a unit is pending, further failures are only counted; the next copy has them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from .cuda_graphs import is_capturing

logger = logging.getLogger("zeropp")


class StaleWeightsError(RuntimeError):
    """Weights changed without notice to zeropp, and a gather used the node shard of the old weights."""


class Alarm:
    """Failed checks of all units of one model."""

    def __init__(self) -> None:
        self.at_once: bool | None = None
        """Whether a failed check raises in the call that makes it. None: on CPU, where the read is free."""
        self._counts: dict[str, _Count] = {}
        self.on_the_way: dict[str, _Count] = {}  # counts with a pending copy, oldest first

    def report(self, unit: str, mismatch: Tensor) -> None:
        """Record a check of the unit, which failed if `mismatch` (a bool on the device) is true.

        Call it on the stream of the check.
        """
        if type(mismatch) is not Tensor:  # fake tensors of a dry run have no value, and never go stale
            return
        count = self._counts.get(unit)
        if count is None:
            count = self._counts[unit] = _Count(mismatch.device)
        count.found.add_(mismatch)
        if mismatch.device.type == "cpu" if self.at_once is None else self.at_once:
            self._raise({unit: count}, _Count.wait)
        elif unit not in self.on_the_way:
            count.send()
            self.on_the_way[unit] = count

    def raise_if_known(self) -> None:
        """Raise if the host knows of a failed check. Never waits."""
        arrived: dict[str, _Count] = {}
        for unit, count in self.on_the_way.items():
            if not count.has_arrived():
                break  # the oldest copy arrives first
            arrived[unit] = count
        for unit in arrived:
            del self.on_the_way[unit]
        self._raise(arrived, _Count.read)

    def raise_if_any(self) -> None:
        """Wait for the device, and raise if a check has failed. Not for the hot path."""
        self.on_the_way.clear()
        self._raise(self._counts, _Count.wait)

    def log_if_known(self) -> None:
        """Log known failures at the end of the model's life, where no caller could catch an error."""
        try:
            self.raise_if_known()
        except StaleWeightsError as error:
            logger.error("zeropp: %s", error)

    def _raise(self, counts: dict[str, _Count], ask: Callable[[_Count], bool]) -> None:
        """Raise one error for all units that have failures not raised so far."""
        stale = [f"unit '{unit}'" for unit, count in counts.items() if ask(count)]
        if stale:
            raise StaleWeightsError(
                f"the weights of {', '.join(stale)} changed since they were last sent, and zeropp was not "
                "told, so a gather used the old ones. Optimizer steps, load_state_dict and in-place "
                "operations on parameters (p.add_, p.copy_) are noticed; after any other change (p.data, "
                "p.to_local(), torch._foreach_*, dcp.load into the tensors, a replayed graph) call "
                "invalidate() on every rank, or use Config(secondary=False) for this model. Ranks whose own "
                "part did not change do not raise: they wait for this one, until it ends or they time out"
            )


class _Count:
    """Failed checks of one unit: the count of the device, and the copy of it on the host."""

    def __init__(self, device: torch.device) -> None:
        has_streams = device.type != "cpu"
        with torch.inference_mode(False):  # later training could not write to an inference tensor
            self.found = torch.zeros((), dtype=torch.int64, device=device)
            self._arriving = torch.zeros((), dtype=torch.int64, pin_memory=has_streams)
        self._sent: torch.Event | None = None
        self._told = 0  # failures that were raised already

    def send(self) -> None:
        """Start a copy of the count to the host."""
        self._arriving.copy_(self.found, non_blocking=True)
        if self.found.device.type != "cpu":
            self._sent = torch.accelerator.current_stream().record_event(self._sent)

    def has_arrived(self) -> bool:
        """Whether the last copy is complete."""
        if self._sent is None:
            return True
        # No query of an event during a capture: it would end the capture.
        return not is_capturing(self.found.device) and self._sent.query()

    def read(self) -> bool:
        """Whether the copy on the host has failures that were not raised so far."""
        return self._is_news(int(self._arriving))

    def wait(self) -> bool:
        """Whether the device has failures that were not raised so far. Waits for it."""
        if self.found.device.type != "cpu":
            torch.accelerator.synchronize()  # several streams may write the count
        return self._is_news(int(self.found))

    def _is_news(self, count: int) -> bool:
        """Whether `count` has failures that were not raised so far, and mark them as raised."""
        is_news, self._told = count > self._told, max(count, self._told)
        return is_news
