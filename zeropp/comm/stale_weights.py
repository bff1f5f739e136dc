"""Stale weights that a device has found, on their way to the host: raised without waiting for the device.

[Note: No waiting]
A check runs where the weights are. On CPU its result is there at once. On a device with streams, reading it
would stop the host until the device has caught up, in every gather. So the device counts failed checks of a
unit, the count is copied into pinned memory behind the check, on the same stream, and an event is recorded
behind the copy. Every gather, reduction and optimizer step looks whether the first event on the way has
passed, and if so, reads the host's copy. The error thus comes some calls after the stale gather: as many as
the host is ahead of the device. While a copy is on its way, further failures of the unit only count, for the
next copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from .cuda_graphs import is_capturing

logger = logging.getLogger("zeropp")


class StaleWeightsError(RuntimeError):
    """Weights changed without zeropp being told, while a node shard of the old ones was in use."""


class Alarm:
    """The failed checks of all units of one model."""

    def __init__(self) -> None:
        self.at_once: bool | None = None
        """Whether a failed check raises where it is made. None: on CPU, where reading it costs nothing."""
        self._counts: dict[str, _Count] = {}
        self.on_the_way: dict[str, _Count] = {}  # in order of sending

    def report(self, unit: str, mismatch: Tensor) -> None:
        """A check of the unit failed if `mismatch` (a bool on the device) is true. Call it on the stream of
        the check."""
        if type(mismatch) is not Tensor:  # fake tensors of a dry run: no value, and nothing there goes stale
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
        """Raise if failed checks have arrived. Never waits."""
        arrived: dict[str, _Count] = {}
        for unit, count in self.on_the_way.items():
            if not count.has_arrived():
                break
            arrived[unit] = count
        for unit in arrived:
            del self.on_the_way[unit]
        self._raise(arrived, _Count.read)

    def raise_if_any(self) -> None:
        """Wait for the device, and raise if any check has failed. Not for the hot path."""
        self.on_the_way.clear()
        self._raise(self._counts, _Count.wait)

    def log_if_known(self) -> None:
        """Log what is known at the end of the model's life, where nobody would catch an error."""
        try:
            self.raise_if_known()
        except StaleWeightsError as error:
            logger.error("zeropp: %s", error)

    def _raise(self, counts: dict[str, _Count], ask: Callable[[_Count], bool]) -> None:
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
    """Failed checks of one unit: as the device counts them, and as far as the host knows."""

    def __init__(self, device: torch.device) -> None:
        has_streams = device.type != "cpu"
        with torch.inference_mode(False):  # it outlives the evaluation in which it may be made
            self.found = torch.zeros((), dtype=torch.int64, device=device)
            self._arriving = torch.zeros((), dtype=torch.int64, pin_memory=has_streams)
        self._sent: torch.Event | None = None
        self._told = 0

    def send(self) -> None:
        self._arriving.copy_(self.found, non_blocking=True)
        if self.found.device.type != "cpu":
            self._sent = torch.accelerator.current_stream().record_event(self._sent)

    def has_arrived(self) -> bool:
        if self._sent is None:
            return True
        # An event must not be asked during a capture: that would end it.
        return not is_capturing(self.found.device) and self._sent.query()

    def read(self) -> bool:
        """Whether there are failures that nobody was told of, among those that have arrived."""
        return self._is_news(int(self._arriving))

    def wait(self) -> bool:
        """The same, among all."""
        if self.found.device.type != "cpu":
            torch.accelerator.synchronize()  # whichever streams have written it
        return self._is_news(int(self.found))

    def _is_news(self, count: int) -> bool:
        is_news, self._told = count > self._told, max(count, self._told)
        return is_news
