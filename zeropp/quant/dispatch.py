"""Which implementation of the block formats works on a tensor: the one place that decides."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import noop as dry
from . import reference
from .formats import BlockFormat, RowOrder

logger = logging.getLogger("zeropp")

# By device: the module, the package it needs, the extra that brings it, and how much slower plain torch is.
# ROCm devices are "cuda" to torch. The factor of the CPU: 9 to 104 over operations and dtypes, 27 in the
# middle (4M elements, one thread). On a GPU nobody has measured it.
FAST = {
    "cpu": (".cpu.launch", "numba", "cpu", "about 30 times as slow"),
    "cuda": (".gpu.launch", "triton", "gpu", "slow"),
}


class Implementation(Protocol):
    """What reference.py defines."""

    def encode(
        self,
        fmt: BlockFormat,
        source: Tensor,
        out: Tensor,
        order: RowOrder | None = None,
        seed: int | None = None,
        offset: int = 0,
    ) -> None: ...
    def decode(
        self, fmt: BlockFormat, encoded: Tensor, out: Tensor, order: RowOrder | None = None
    ) -> None: ...
    def decode_sum(
        self, fmt: BlockFormat, encoded: Tensor, out: Tensor, factor: float = 1.0, accumulate: bool = False
    ) -> None: ...
    def recode(
        self,
        fmt: BlockFormat,
        encoded: Tensor,
        into: BlockFormat,
        out: Tensor,
        numel: int,
        factor: float = 1.0,
        seed: int | None = None,
        offset: int = 0,
    ) -> None: ...


def implementation_for(tensor: Tensor) -> Implementation:
    """The fastest implementation for this tensor's device; reference.py if there is no other.

    Tensor subclasses have no memory that a kernel could work on, and fake tensors of a dry run none at all.
    """
    if isinstance(tensor, FakeTensor):
        return cast(Implementation, dry)
    if type(tensor) is not torch.Tensor:
        return cast(Implementation, reference)
    return _implementation(tensor.device.type)


@cache
def _implementation(device_type: str) -> Implementation:
    if device_type not in FAST:
        logger.warning(
            "zeropp has no kernels for device '%s'; it quantizes in plain torch, which is slow", device_type
        )
        return cast(Implementation, reference)
    module, package, extra, slowness = FAST[device_type]
    try:
        return cast(Implementation, import_module(module, __package__))
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        logger.warning(
            "zeropp: %s is not installed, so tensors on '%s' are quantized in plain torch, which is %s; "
            "install zeropp[%s]",
            package, device_type, slowness, extra,
        )  # fmt: skip
        return cast(Implementation, reference)
