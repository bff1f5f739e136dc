"""Memory of one rank by purpose, and the count of live storages that it comes from.

[Note: Live storages]
A storage lives as long as anything refers to it. The memory in use is therefore the sum over all storages
that operations have created and that are not garbage-collected. There is one exception: FSDP2 frees gathered
weights by resizing their storages to zero, and allocates them by resizing them back. No operation shows these
resizes. The outputs of FSDP2's copy-out are these storages, and their sizes are read each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, UntypedStorage


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank at one moment of a step."""

    shards: int
    """The rank's shard of the weights, in the optimizer's dtype."""
    optimizer_state: int
    gradients: int
    """The rank's shard of the gradients, in the optimizer's dtype."""
    node_shards: int
    """zeropp's node shards, which keep later gathers inside the node (hpZ)."""
    gathered: int
    """Full weights of the units that FSDP2 has gathered."""
    communication: int
    """Buffers of the hops, and gradients that wait for the hop across nodes."""
    activations: int
    """Tensors saved for backward, and temporary tensors: full gradients of the unit in backward, FSDP2's
    copies before and after a collective."""

    @property
    def peak(self) -> int:
        """Sum of all bytes, which is the step's peak if the moment is the step's largest."""
        return sum(vars(self).values())

    def extrapolate(self, larger: MemoryEstimate, times: int) -> MemoryEstimate:
        """Add the difference between `larger` and this estimate `times` times."""
        pairs = zip(vars(self).values(), vars(larger).values(), strict=True)
        return MemoryEstimate(*(mine + times * (theirs - mine) for mine, theirs in pairs))


class LiveStorages:
    """Counts the bytes of live storages. See [Note: Live storages].

    >>> import torch
    >>> live = LiveStorages()
    >>> x = torch.zeros(10)
    >>> live.add(x), live.add(x.view(2, 5))
    (True, False)
    >>> live.nbytes
    40
    >>> del x
    >>> live.nbytes
    0
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._fixed_bytes = 0
        self._resized: dict[int, weakref.ref[UntypedStorage]] = {}

    @property
    def nbytes(self) -> int:
        return self._fixed_bytes + self.resized_bytes

    @property
    def resized_bytes(self) -> int:
        """Bytes of the storages that FSDP2 resizes: the gathered weights."""
        total = 0
        for ref in self._resized.values():
            storage = ref()
            if storage is not None:
                total += storage.nbytes()
        return total

    def add(self, tensor: Tensor) -> bool:
        """Count the storage of a tensor that an operation has returned. Return whether it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or key in self._resized:
            return False
        self._sizes[key] = storage.nbytes()
        self._fixed_bytes += storage.nbytes()
        weakref.finalize(storage, self._forget, key)
        return True

    def add_resized(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of these tensors by their size at the moment, because FSDP2 resizes them."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._fixed_bytes -= self._sizes.pop(storage._cdata, 0)
            self._resized.setdefault(storage._cdata, weakref.ref(storage))

    def _forget(self, key: int) -> None:
        self._fixed_bytes -= self._sizes.pop(key, 0)
        self._resized.pop(key, None)


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of these tensors, each counted once. DTensors count locally."""
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    storages = {storage._cdata: storage.nbytes() for t in local for storage in (t.untyped_storage(),)}
    return sum(storages.values())
