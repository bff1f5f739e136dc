"""Which implementation of the block formats works on a tensor: the only place that decides."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import noop, reference

logger = logging.getLogger("zeropp")

Implementation = ModuleType
"""A module with the four public functions of reference.py."""

# By device: the module, the package it needs, the extra that installs it, and how much slower plain torch is.
# ROCm devices are "cuda" to torch. The factor of the CPU: 9 to 104 over operations and dtypes, 27 in the
# middle (4M elements, one thread). It was never measured on a GPU.
FAST = {
    "cpu": (".cpu.launch", "numba", "cpu", "about 30 times as slow"),
    "cuda": (".gpu.launch", "triton", "gpu", "slow"),
}


def implementation_for(tensor: Tensor) -> Implementation:
    """Return the fastest implementation for this tensor's device; reference.py if there is no other.

    Tensor subclasses have no memory for a kernel to work on. Fake tensors of a dry run have no content.
    """
    if isinstance(tensor, FakeTensor):
        return noop
    if type(tensor) is not torch.Tensor:
        return reference
    return _implementation(tensor.device.type)


@cache
def _implementation(device_type: str) -> Implementation:
    if device_type not in FAST:
        logger.warning(
            "zeropp has no kernels for device '%s'; it quantizes in plain torch, which is slow", device_type
        )
        return reference
    module, package, extra, slowness = FAST[device_type]
    try:
        return import_module(module, __package__)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        logger.warning(
            "zeropp: %s is not installed, so tensors on '%s' are quantized in plain torch, which is %s; "
            "install zeropp[%s]",
            package, device_type, slowness, extra,
        )  # fmt: skip
        return reference
