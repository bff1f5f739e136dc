"""Memory of one rank, by what it is for; and the count of live storages that it is taken from.

[Note: Live storages]
A tensor's memory is its storage's, and a storage lives as long as anything refers to it. So the memory in
use is the sum over storages that an operation made and that are not collected yet. There is one exception:
FSDP2 frees gathered weights by resizing their storages to zero and allocates them by resizing them back,
which no operation shows. Those storages are known from FSDP2's copy-out, and asked for their size each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, UntypedStorage


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank at the moment of a step when their sum is largest."""

    shards: int
    """The rank's part of the weights, as the optimizer keeps them."""
    optimizer_state: int
    gradients: int
    """The rank's part of the gradients, as the optimizer reads them."""
    node_shards: int
    """What zeropp keeps so that later gathers stay inside the node (hpZ)."""
    gathered: int
    """Full weights of the units that FSDP2 has gathered."""
    communication: int
    """Buffers of the hops, and gradients that wait for the hop across nodes."""
    activations: int
    """What forward saved for backward, and the intermediate results of the moment: full gradients of the
    unit that is in backward, FSDP2's copies on the way to and from a collective."""

    @property
    def peak(self) -> int:
        return sum(vars(self).values())

    def grown(self, larger: MemoryEstimate, times: int) -> MemoryEstimate:
        """What comes after `times` steps like the one from here to `larger`."""
        pairs = zip(vars(self).values(), vars(larger).values(), strict=True)
        return MemoryEstimate(*(mine + times * (theirs - mine) for mine, theirs in pairs))


class LiveStorages:
    """Counts the bytes of storages that are alive. See [Note: Live storages].

    >>> import torch
    >>> live = LiveStorages()
    >>> x = torch.zeros(10)
    >>> live.see(x), live.see(x.view(2, 5))
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
        """Bytes of the storages that change their size: the gathered weights."""
        total = 0
        for ref in self._resized.values():
            storage = ref()
            if storage is not None:
                total += storage.nbytes()
        return total

    def see(self, tensor: Tensor) -> bool:
        """An operation has returned this tensor. Whether its storage is a new one."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or key in self._resized:
            return False
        self._sizes[key] = storage.nbytes()
        self._fixed_bytes += storage.nbytes()
        weakref.finalize(storage, self._forget, key)
        return True

    def see_resized(self, tensors: Iterable[Tensor]) -> None:
        """The storages of these tensors come and go by being resized."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._fixed_bytes -= self._sizes.pop(storage._cdata, 0)
            self._resized.setdefault(storage._cdata, weakref.ref(storage))

    def _forget(self, key: int) -> None:
        self._fixed_bytes -= self._sizes.pop(key, 0)
        self._resized.pop(key, None)


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of these tensors, each counted once; of a DTensor, of this rank's part."""
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    storages = {storage._cdata: storage.nbytes() for t in local for storage in (t.untyped_storage(),)}
    return sum(storages.values())
