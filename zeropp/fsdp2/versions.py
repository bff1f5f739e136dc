"""The private parts of FSDP2 that zeropp uses, and their differences between versions of torch.

[Note: Versions]
`check` runs in every `find_units`, before any change to the model: every used part must exist and have the
known type. Differences between versions are in the two readers, and nowhere else. A version outside `TESTED`
causes a warning, and works if the check passes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import cache
from inspect import signature
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_common as common

from ..comm import AllGather, ReduceScatter

logger = logging.getLogger("zeropp")

TESTED = ("2.13", "2.14", "2.15")
TORCH: str = vars(torch)["__version__"]  # mypy has no type of torch.__version__ at module level
VERSION = ".".join(TORCH.split(".")[:2])

Parts = Mapping[str, type | tuple[type, ...]]
"""Attributes that zeropp uses of an object, and their expected types."""
DISTRIBUTED: Parts = {"all_gather_single": FunctionType, "reduce_scatter_single": FunctionType}
COLLECTIVES: Parts = {"DefaultAllGather": type, "DefaultReduceScatter": type}
COMMON: Parts = {"FSDPMeshInfo": type}
SETTERS = (
    "all_reduce_hook",
    "custom_all_gather",
    "custom_reduce_scatter",
    "modules_to_forward_prefetch",
    "reduce_scatter_unused_params",
    "requires_gradient_sync",
)
MODULE: Parts = {"_get_fsdp_state": FunctionType} | {f"set_{name}": FunctionType for name in SETTERS}
STATE: Parts = {
    "_fsdp_param_groups": (list, tuple),
    "_states_to_backward_prefetch": list,
    "_states_to_forward_prefetch": list,
    "_training_state": object,
}
GROUP: Parts = {
    "_all_gather_comm": object,
    "_all_gather_result": object,
    "_all_reduce_hook": object,
    "_is_hsdp": bool,
    "_partial_reduce_output": (Tensor, type(None)),
    "_post_forward_indices": list,
    "_reduce_scatter_comm": object,
    "_training_state": object,
    "comm_ctx": object,
    "device": torch.device,
    "device_handle": object,
    "finalize_backward": MethodType,
    "fsdp_params": list,
    "mesh_info": object,
    "post_backward": MethodType,
    "reduce_grads": bool,
    "reduce_scatter_unused_params": bool,
}
CONTEXT: Parts = {  # exists from the first forward on
    "_last_post_reduce_events": dict,
    "reduce_scatter_max_input_buffers": int,
    "reduce_scatter_states": list,
}
SHARD_MESH: Parts = {
    "reduce_scatter_process_group": (ProcessGroup, type(None)),
    "shard_process_group": ProcessGroup,
}
PARAM: Parts = {
    "_module_info.module": nn.Module,
    "_module_info.param_name": str,
    "_module_info.shared_modules": list,
    "_sharded_local_tensor": Tensor,
    "mp_policy": MixedPrecisionPolicy,
    "offload_to_cpu": bool,
    "padded_sharded_param_size": torch.Size,
    "sharded_param": nn.Parameter,
    "sharded_state.name": str,
    "unsharded_accumulated_grad": (Tensor, type(None)),
}


class ReaderOf213:
    """torch 2.13 and 2.14: gradients are packed in the order of parameters, in the compute dtype."""

    group: ClassVar[Parts] = {}
    param: ClassVar[Parts] = {
        "accumulate_unsharded_grad_if_needed": MethodType,
        "to_accumulated_grad_if_needed": MethodType,
    }
    accumulates_apart: ClassVar[bool] = True  # unreduced gradients are in two places, not only `.grad`

    @staticmethod
    def reduce_order(group: Any) -> list[Any]:
        return list(group.fsdp_params)

    @staticmethod
    def gradient_dtype(param: Any) -> torch.dtype:
        return compute_dtype(param)

    @staticmethod
    def bring_to_one_dtype(params: list[Any]) -> None:
        """Convert gradients to the reduce dtype before FSDP2 reduces unused parameters as zeros.

        Gradients that FSDP2 has held are in the reduce dtype. New gradients and zeros of unused parameters
        are not. FSDP2 refuses to reduce them together (PyTorch issue 196996).
        """
        if all(p.unsharded_accumulated_grad is None for p in params):
            return
        for param in params:
            param.accumulate_unsharded_grad_if_needed()
            param.to_accumulated_grad_if_needed()
            full = param._unsharded_param
            if full.requires_grad and param.unsharded_accumulated_grad is None and full.grad is None:
                param.unsharded_accumulated_grad = torch.zeros_like(full, dtype=param.reduce_dtype)


class ReaderOf215:
    """torch 2.15: each parameter has its `grad_dtype`, and gradients of one dtype are packed together. FSDP2
    knows the order from the first forward on."""

    group: ClassVar[Parts] = {"_reduce_scatter_param_indices": list}
    param: ClassVar[Parts] = {"sharded_grad_dtype": (torch.dtype, type(None))}
    accumulates_apart: ClassVar[bool] = False

    @staticmethod
    def reduce_order(group: Any) -> list[Any]:
        known = group._reduce_scatter_param_indices or range(len(group.fsdp_params))  # else a guess
        return [group.fsdp_params[index] for index in known]

    @staticmethod
    def bring_to_one_dtype(params: list[Any]) -> None:
        """No-op: FSDP2 converts them."""

    @staticmethod
    def gradient_dtype(param: Any) -> torch.dtype:
        return param.sharded_grad_dtype or compute_dtype(param)  # None: the dtype of autograd


READER = ReaderOf213 if tuple(map(int, VERSION.split("."))) < (2, 15) else ReaderOf215


def compute_dtype(param: Any) -> torch.dtype:
    """Return the dtype to which FSDP2 casts a parameter when it gathers it."""
    cast_to, dtype = param.mp_policy.param_dtype, sharded_parameter(param).dtype
    return cast_to if cast_to and dtype.is_floating_point else dtype


def sharded_parameter(param: Any) -> nn.Parameter:
    """Return the sharded parameter of the module. It may differ from FSDP2's: a loader that fills a model on
    the meta device assigns new parameters to the module, and FSDP2 reads them in the first forward."""
    info = param._module_info
    is_sharded = param.sharded_state.name == "SHARDED"  # otherwise the module has the full parameter
    return getattr(info.module, info.param_name) if is_sharded else param.sharded_param  # type: ignore[no-any-return]


def check(modules: list[FSDPModule]) -> None:
    """Raise if this version of FSDP2 lacks a used part; see [Note: Versions]."""
    for name, example, parts in _what_is_read(modules):
        check_parts(name, example, parts)
    defaults = (collectives.DefaultAllGather, collectives.DefaultReduceScatter)
    for ours, theirs in zip((AllGather, ReduceScatter), defaults, strict=True):
        for method in ("allocate", "__call__"):
            known, given = (set(signature(getattr(c, method)).parameters) for c in (ours, theirs))
            if new := given - known:  # FSDP2 would pass arguments that zeropp's comms do not take
                _refuse([f"{theirs.__name__}.{method} has new parameters: {', '.join(sorted(new))}"])
    if VERSION not in TESTED:
        _warn_untested()


def _what_is_read(modules: list[FSDPModule]) -> Iterator[tuple[str, Any, Parts]]:
    """Yield each used part of FSDP2, from the outside in: its name, an example, and its attributes."""
    yield "torch.distributed", torch.distributed, DISTRIBUTED
    yield "_fsdp_collectives", collectives, COLLECTIVES
    yield "_fsdp_common", common, COMMON
    yield "FSDPModule", FSDPModule, MODULE
    for module in modules:
        state: Any = module._get_fsdp_state()
        yield "FSDPState", state, STATE
        for group in state._fsdp_param_groups:
            yield "FSDPParamGroup", group, {**GROUP, **READER.group}
            if isinstance(group.mesh_info, common.FSDPMeshInfo):
                yield "FSDPMeshInfo", group.mesh_info, SHARD_MESH
            yield "FSDPParam", group.fsdp_params[0], {**PARAM, **READER.param}
            return  # all others have the same classes


def check_parts(name: str, example: Any, parts: Parts) -> None:
    """Raise if `example` lacks one of `parts`, or has it with another type."""
    if wrong := [text for path, kind in parts.items() if (text := _wrong(example, path, kind))]:
        _refuse([f"{name}.{text}" for text in wrong])


def _wrong(example: Any, path: str, kind: type | tuple[type, ...]) -> str | None:
    try:
        value = attrgetter(path)(example)
    except AttributeError:
        return f"{path} is missing"
    return None if isinstance(value, kind) else f"{path} is a {type(value).__name__}, expected {kind}"


def _refuse(wrong: list[str]) -> NoReturn:
    raise RuntimeError(
        f"zeropp cannot work with FSDP2 of torch {TORCH}: {'; '.join(wrong)}. It is tested with "
        f"torch {', '.join(TESTED)}: install one of these"
    )


@cache
def _warn_untested() -> None:
    logger.warning(
        "zeropp is tested with torch %s, and this is %s; what it needs of FSDP2 is there, and it goes on",
        ", ".join(TESTED),
        TORCH,
    )
