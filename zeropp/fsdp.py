"""The adapter: finds the units of an FSDP2 model and puts comms into them. The only file that knows what is
private in FSDP2.

[Note: Versions]
`_check` runs in every `find_units`, so before anything is changed: all that is read here must be there and be
of the type that we know. What differs between versions of torch is in the two readers, and nowhere else. A
version outside `TESTED` is warned about and used if the check passes.

[Note: Operations on parameters]
A sharded parameter is a DTensor. An in-place operation on it (p.add_, p.copy_, p.lerp_) is one on all ranks,
also on those whose shard is empty: DTensor asks that of every program. It moves the DTensor's version
counter, so this is a change that all ranks see alike. Operations on what is inside (p.data, p.to_local(),
loads of torch.distributed.checkpoint into the tensors) may differ between ranks, and do not move it; nor do
foreach and fused operations, so optimizers need hooks. A program that operates on a DTensor on some ranks
only breaks DTensor's rule, and hangs here: those ranks send, and the others do not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, reduce
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
from torch.utils.hooks import RemovableHandle

from .comm import AllGather, ReduceScatter

logger = logging.getLogger("zeropp")

TESTED = ("2.13", "2.14", "2.15")
TORCH: str = vars(torch)["__version__"]  # mypy cannot tell the type of torch.__version__ at module level
VERSION = ".".join(TORCH.split(".")[:2])
ROOT = "(root)"
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}  # of torch.compile and activation checkpointing

Parts = Mapping[str, type | tuple[type, ...]]
"""What is read of something, and the type that it must have."""
DISTRIBUTED: Parts = {"all_gather_single": FunctionType, "reduce_scatter_single": FunctionType}
COLLECTIVES: Parts = {"DefaultAllGather": type, "DefaultReduceScatter": type}
COMMON: Parts = {"FSDPMeshInfo": type}
SETTERS = ("all_reduce_hook", "custom_all_gather", "custom_reduce_scatter", "reduce_scatter_unused_params")
MODULE: Parts = {"_get_fsdp_state": FunctionType} | {f"set_{name}": FunctionType for name in SETTERS}
STATE: Parts = {"_fsdp_param_groups": (list, tuple)}
GROUP: Parts = {
    "_all_gather_comm": object,
    "_is_hsdp": bool,
    "_partial_reduce_output": (Tensor, type(None)),
    "_reduce_scatter_comm": object,
    "_training_state": object,
    "comm_ctx": object,
    "device_handle": object,
    "finalize_backward": MethodType,
    "fsdp_params": list,
    "mesh_info": object,
    "post_backward": MethodType,
    "reduce_grads": bool,
    "reduce_scatter_unused_params": bool,
}
CONTEXT: Parts = {"_last_post_reduce_events": dict, "reduce_scatter_states": list}  # of the first forward on
SHARD_MESH: Parts = {
    "reduce_scatter_process_group": (ProcessGroup, type(None)),
    "shard_process_group": ProcessGroup,
}
PARAM: Parts = {
    "_module_info.module": nn.Module,
    "_module_info.shared_modules": list,
    "_sharded_local_tensor": Tensor,
    "mp_policy": MixedPrecisionPolicy,
    "padded_sharded_param_size": torch.Size,
    "sharded_param": nn.Parameter,
    "unsharded_accumulated_grad": (Tensor, type(None)),
}


class ReaderOf213:
    """torch 2.13 and 2.14: gradients are packed in the order of parameters, in the dtype of computing."""

    group: ClassVar[Parts] = {}
    param: ClassVar[Parts] = {}
    accumulates_apart: ClassVar[bool] = True  # what is not reduced is held in two places, not only in `.grad`

    @staticmethod
    def reduce_order(group: Any) -> list[Any]:
        return list(group.fsdp_params)

    @staticmethod
    def gradient_dtype(param: Any) -> torch.dtype:
        return _compute_dtype(param)


class ReaderOf215:
    """torch 2.15: gradients follow each parameter's `grad_dtype`, and those of one dtype are packed together;
    FSDP2 knows the order from the first forward on."""

    group: ClassVar[Parts] = {"_reduce_scatter_param_indices": list}
    param: ClassVar[Parts] = {"sharded_grad_dtype": (torch.dtype, type(None))}
    accumulates_apart: ClassVar[bool] = False

    @staticmethod
    def reduce_order(group: Any) -> list[Any]:
        known = group._reduce_scatter_param_indices or range(len(group.fsdp_params))  # a guess, if unknown
        return [group.fsdp_params[index] for index in known]

    @staticmethod
    def gradient_dtype(param: Any) -> torch.dtype:
        return param.sharded_grad_dtype or _compute_dtype(param)  # None: as autograd makes them


READER = ReaderOf213 if tuple(map(int, VERSION.split("."))) < (2, 15) else ReaderOf215


def _compute_dtype(param: Any) -> torch.dtype:
    """What FSDP2 casts a parameter to when it gathers it."""
    cast_to, dtype = param.mp_policy.param_dtype, param.sharded_param.dtype
    return cast_to if cast_to and dtype.is_floating_point else dtype  # type: ignore[no-any-return]


class Unit:
    """One FSDP2 parameter group: the parameters that are gathered and reduced together."""

    def __init__(self, names: list[str], module: FSDPModule, param_groups: list[Any]) -> None:
        self.names = names
        """Names of its modules in the model; several for `fully_shard([a, b])`. `(root)` is all of it."""
        self.module: Any = module
        """The first of them: an nn.Module and an FSDPModule."""
        self._param_groups = param_groups  # one, except with a mesh per parameter
        self._sends_unused: bool | None = None  # what the user had set: see `send_unused_gradients`

    @property
    def name(self) -> str:
        return ", ".join(self.names)

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that the unit is sharded over; None if it is only replicated."""
        mesh = self._param_groups[0].mesh_info
        return mesh.shard_process_group if isinstance(mesh, common.FSDPMeshInfo) else None

    @property
    def reduces_in_own_group(self) -> bool:
        """Whether `set_separate_reduce_scatter_group` asked for communicators of their own for gradients."""
        mesh = self._param_groups[0].mesh_info
        return isinstance(mesh, common.FSDPMeshInfo) and mesh.reduce_scatter_process_group is not None

    @property
    def params(self) -> list[nn.Parameter]:
        """The sharded parameters, as the optimizer knows them."""
        return [p.sharded_param for p in self._fsdp_params]

    @property
    def _fsdp_params(self) -> list[Any]:
        return [p for group in self._param_groups for p in group.fsdp_params]

    @property
    def is_frozen(self) -> bool:
        return not any(p.requires_grad for p in self.params)

    @property
    def is_hsdp(self) -> bool:
        return bool(self._param_groups[0]._is_hsdp)

    def version(self) -> list[int]:
        """Moves with in-place operations on a parameter, on all ranks: [Note: Operations on parameters]."""
        return [0 if p.is_inference() else p._version for p in self.params]

    def gather_lengths(self) -> tuple[int, ...]:
        """Elements of each parameter in a rank's shard, padding included, in the order in which weights are
        gathered; the same on every rank."""
        return tuple(p.padded_sharded_param_size.numel() for p in self._fsdp_params)

    def reduce_lengths(self) -> tuple[int, ...]:
        """The same for what is reduced, if all that is trained has a gradient. Before FSDP2 has run, in the
        order of weights, which need not be true from torch 2.15 on."""
        order = [p for group in self._param_groups for p in READER.reduce_order(group)]
        return tuple(p.padded_sharded_param_size.numel() for p in order if p.sharded_param.requires_grad)

    def gather_dtypes(self) -> set[torch.dtype]:
        """The dtypes that FSDP2 gathers; if there are several, it sends raw bytes."""
        return {_compute_dtype(p) for p in self._fsdp_params}

    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype that FSDP2 reduces gradients in, all of them in one; None if nothing is trained."""
        trained = [p for p in self._fsdp_params if p.sharded_param.requires_grad]
        dtypes = {p.mp_policy.reduce_dtype or READER.gradient_dtype(p) for p in trained}
        return reduce(torch.promote_types, dtypes) if dtypes else None

    def gathered(self) -> tuple[int, torch.dtype]:
        """Elements that a rank sends in a gather, and their dtype: bytes, if there are several."""
        lengths, dtypes = self.gather_lengths(), [_compute_dtype(p) for p in self._fsdp_params]
        if len(set(dtypes)) == 1:
            return sum(lengths), dtypes[0]
        pairs = zip(lengths, dtypes, strict=True)
        return sum(length * dtype.itemsize for length, dtype in pairs), torch.uint8

    def reduced(self) -> int:
        """Elements that a rank gets of a reduction of all parameters that can have a gradient."""
        pairs = zip(self.gather_lengths(), self.params, strict=True)
        return sum(length for length, p in pairs if p.requires_grad)

    @property
    def shard_bytes(self) -> int:
        """A rank's part of the parameters, padding included."""
        pairs = zip(self.gather_lengths(), self.params, strict=True)
        return sum(length * p.dtype.itemsize for length, p in pairs)

    def gather_extensions(self) -> set[str]:
        """Types of its tensor subclasses (float8, NF4) that say themselves what is gathered of them."""
        shards = [p._sharded_local_tensor for p in self._fsdp_params]
        return {type(shard).__name__ for shard in shards if hasattr(shard, "fsdp_pre_all_gather")}

    def why_left_alone(self) -> str | None:
        """Why FSDP2's own comms must stay, or None if they can be replaced."""
        if len(self._param_groups) > 1:
            return "several parameter groups, each on a mesh of its own: FSDP2 takes no custom comms"
        if self.group is None or self.group.size() == 1:
            return "a shard group of one rank: nothing is sent"
        group = self._param_groups[0]
        defaults = (collectives.DefaultAllGather, collectives.DefaultReduceScatter)
        comms = (group._all_gather_comm, group._reduce_scatter_comm)
        custom = [comm for comm in comms if type(comm) not in (*defaults, AllGather, ReduceScatter)]
        if custom:
            return f"has custom comms already: {', '.join(type(comm).__name__ for comm in custom)}"
        return None

    def installed(self) -> AllGather | None:
        """Our all-gather, if it is in place."""
        comm = self._param_groups[0]._all_gather_comm
        return comm if isinstance(comm, AllGather) else None

    def install(self, all_gather: Any, reduce_scatter: Any) -> None:
        """Put comms in place: ours, or any objects with their `allocate` and `__call__`."""
        self.module.set_custom_all_gather(all_gather)
        self.module.set_custom_reduce_scatter(reduce_scatter)

    def restore(self) -> None:
        """Give the unit back to FSDP2."""
        self.module.set_custom_all_gather(collectives.DefaultAllGather())
        self.module.set_custom_reduce_scatter(collectives.DefaultReduceScatter())
        self.send_unused_as_set()

    def send_unused_gradients(self) -> None:
        """Reduce parameters without a gradient as zeros, so that every reduction has the same layout."""
        if self._sends_unused is None:  # now, not earlier: what another apply() had set is undone by now
            self._sends_unused = bool(self._param_groups[0].reduce_scatter_unused_params)
        self.module.set_reduce_scatter_unused_params(True, recurse=False)

    def send_unused_as_set(self) -> None:
        """Undo `send_unused_gradients`: parameters without a gradient are sent as the user had said."""
        if self._sends_unused is not None:
            self.module.set_reduce_scatter_unused_params(self._sends_unused, recurse=False)
            self._sends_unused = None

    def on_all_reduce(self, react: Callable[[Tensor], None]) -> None:
        """Call `react` with the shard of gradients whenever it has been reduced over all replicas of HSDP."""
        self.module.set_all_reduce_hook(react)

    @property
    def reduces_gradients(self) -> bool:
        """False while the loop has called `set_requires_gradient_sync(False)`."""
        return bool(self._param_groups[0].reduce_grads)

    @property
    def holds_gradients(self) -> bool:
        """Whether FSDP2 has gradients that it was told not to reduce, or not over all replicas."""
        partial = any(group._partial_reduce_output is not None for group in self._param_groups)
        return partial or any(_held(p) for p in self._fsdp_params)

    def drop_held_gradients(self) -> None:
        for group in self._param_groups:
            group._partial_reduce_output = None
            for param in filter(_held, group.fsdp_params):
                param._unsharded_param.grad = None
                if READER.accumulates_apart:
                    param.unsharded_accumulated_grad = None

    def reduce_zeros(self) -> None:
        """Between two backwards: what FSDP2 does at the end of one that leaves every gradient at zero. So it
        is FSDP2 that scales and converts what comes out, adds it to `.grad`, and calls hooks on it."""
        for group in self._param_groups:
            state, context = group._training_state, group.comm_ctx
            _check_parts("FSDPCommContext", context, CONTEXT)
            with torch.no_grad():
                group.post_backward()
            group._training_state = state
            events = [*context._last_post_reduce_events.values()]
            for event in (*events, *(reduction.event for reduction in context.reduce_scatter_states)):
                if event is not None:
                    group.device_handle.current_stream().wait_event(event)
            context._last_post_reduce_events.clear()
            context.reduce_scatter_states.clear()
            group.finalize_backward()

    def on_load(self, react: Callable[[], None]) -> list[RemovableHandle]:
        """Call `react` after a state-dict load into any module that owns a parameter of the unit."""
        infos = [p._module_info for p in self._fsdp_params]
        owners = {module for info in infos for module in (info.module, *info.shared_modules)}
        return [owner.register_load_state_dict_post_hook(lambda *_: react()) for owner in owners]

    def shares_parameters_with(self, others: Iterable[Unit]) -> bool:
        theirs = {id(group) for other in others for group in other._param_groups}
        return any(id(group) in theirs for group in self._param_groups)


def find_units(model: nn.Module) -> list[Unit]:
    """The units of `model` and of the modules in it, in order of `named_modules`: the same on every rank."""
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    _check([module for _, module in modules])
    found: dict[int, Unit] = {}
    for name, module in modules:
        state = module._get_fsdp_state()
        if id(state) in found:
            found[id(state)].names.append(_clean(name))
        elif state._fsdp_param_groups:
            found[id(state)] = Unit([_clean(name)], module, state._fsdp_param_groups)
    return list(found.values())


def gather_copies() -> tuple[Any, Any]:
    """FSDP2's operations around an all-gather: shards into the buffer, and the buffer into parameters."""
    return torch.ops.fsdp.all_gather_copy_in, torch.ops.fsdp.split_with_sizes_copy


def _held(param: Any) -> bool:
    unsharded = getattr(param, "_unsharded_param", None)  # made in the first forward
    return unsharded is not None and not (param.unsharded_accumulated_grad is unsharded.grad is None)


def _check(modules: list[FSDPModule]) -> None:
    """Raise if FSDP2 is not as we know it; see [Note: Versions]."""
    for name, example, parts in _what_is_read(modules):
        _check_parts(name, example, parts)
    defaults = (collectives.DefaultAllGather, collectives.DefaultReduceScatter)
    for ours, theirs in zip((AllGather, ReduceScatter), defaults, strict=True):
        for method in ("allocate", "__call__"):
            known, given = (set(signature(getattr(c, method)).parameters) for c in (ours, theirs))
            if new := given - known:
                _refuse([f"{theirs.__name__}.{method} has new parameters: {', '.join(sorted(new))}"])
    if VERSION not in TESTED:
        _warn_untested()


def _what_is_read(modules: list[FSDPModule]) -> Iterator[tuple[str, Any, Parts]]:
    """Everything that is read of FSDP2, from the outside in, with an example of each thing to look at."""
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
            return  # the others are made of the same classes


def _check_parts(name: str, example: Any, parts: Parts) -> None:
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


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS) or ROOT
