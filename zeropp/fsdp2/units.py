"""The adapter: finds the units of an FSDP2 model and installs comms in them. Apart from versions.py and
post_backward.py, the only file that uses private parts of FSDP2.

[Note: Operations on parameters]
A sharded parameter is a DTensor. DTensor requires that all ranks run an in-place operation on it (p.add_,
p.copy_, p.lerp_), also ranks with an empty shard. The operation increments the DTensor's version counter, so
all ranks see the change alike. Operations on its local tensor (p.data, p.to_local(), loads of
torch.distributed.checkpoint into the tensors) may differ between ranks, and do not increment the counter.
Foreach and fused operations do not increment it either, so optimizers need hooks. A program that operates on
a DTensor on some ranks only violates DTensor's rule, and hangs here: those ranks send, and the others do not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.utils.hooks import RemovableHandle

from ..comm import Piece, Weight
from ..comm.execution import Comm, DiscardableWork
from .gradients import UnitGradients
from .post_backward import PostBackward
from .versions import READER, check, compute_dtype, sharded_parameter

logger = logging.getLogger("zeropp")

ROOT = "(root)"
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}  # torch.compile and checkpointing add them to names


class Unit(UnitGradients):
    """One FSDP2 parameter group: parameters that are gathered and reduced together."""

    def __init__(self, names: list[str], module: FSDPModule, param_groups: list[Any]) -> None:
        self.names = names
        """Names of its modules in the model; several for `fully_shard([a, b])`. `(root)` is the model."""
        self.module: Any = module
        """Its first module: an nn.Module and an FSDPModule."""
        self.modules: list[Any] = [module]
        """All its modules."""
        self._param_groups = param_groups  # one, except with a mesh per parameter
        self._backward = PostBackward(param_groups)

    @property
    def label(self) -> str:
        """A short name for tables."""
        others = len(self.names) - 1
        return f"{self.names[0]} and {others} more" if others > 1 else self.name

    @property
    def group(self) -> ProcessGroup | None:
        """The shard group; None if the unit is only replicated."""
        mesh = self._param_groups[0].mesh_info
        return mesh.shard_process_group if isinstance(mesh, common.FSDPMeshInfo) else None

    @property
    def reduces_in_own_group(self) -> bool:
        """Whether gradients have separate communicators (`set_separate_reduce_scatter_group`)."""
        mesh = self._param_groups[0].mesh_info
        return isinstance(mesh, common.FSDPMeshInfo) and mesh.reduce_scatter_process_group is not None

    def trained(self) -> tuple[bool, ...]:
        """Return which parameters are trained. Runs in every step, like `version`."""
        return tuple(p.sharded_param.requires_grad for p in self._fsdp_params)

    @property
    def frozen(self) -> str | None:
        """Number of frozen parameters in words; None if all are trained."""
        frozen = [p for p in self.params if not p.requires_grad]
        if len(frozen) == len(self.params):
            return "frozen"
        return f"{len(frozen)} of {len(self.params)} parameters frozen" if frozen else None

    def version(self) -> list[int]:
        """Return version counters, which in-place operations increment: [Note: Operations on parameters].

        Reads FSDP2's parameters instead of `params`, because it runs in every step of an optimizer.
        """
        params = [p.sharded_param for p in self._fsdp_params]
        return [0 if p.is_inference() else p._version for p in params]  # inference tensors have no version

    def reduce_pieces(self) -> tuple[Piece, ...]:
        """Return the parameters in a rank's shard of gradients, in their order: those that FSDP2 reduces in
        the running backward. Before the first backward, `trained_pieces`."""
        reduced = self._backward.reduced
        if reduced is None:
            return self.trained_pieces()
        return _pieces(p for p in self._reduce_order if id(p) in reduced)

    def trained_pieces(self) -> tuple[Piece, ...]:
        """Return the pieces of a reduction in which every trained parameter has a gradient. From torch 2.15
        on, their order is a guess until the first forward."""
        return _pieces(p for p in self._reduce_order if sharded_parameter(p).requires_grad)

    @property
    def _reduce_order(self) -> list[Any]:
        return [p for group in self._param_groups for p in READER.reduce_order(group)]

    def gather_dtypes(self) -> set[torch.dtype]:
        """Return the dtypes that FSDP2 gathers. With several dtypes it sends raw bytes."""
        return {compute_dtype(p) for p in self._fsdp_params}

    def reduce_dtype(self) -> torch.dtype | None:
        """Return the dtype in which FSDP2 reduces all gradients; None if no parameter is trained."""
        trained = [p for p in self._fsdp_params if sharded_parameter(p).requires_grad]
        dtypes = {p.mp_policy.reduce_dtype or READER.gradient_dtype(p) for p in trained}
        return reduce(torch.promote_types, dtypes) if dtypes else None

    def gathered(self) -> tuple[Weight, ...]:
        """Return the data that a rank sends of each parameter in a gather, in its order. Parameters with
        `gather_extensions` send other data."""
        return tuple(
            Weight(length, compute_dtype(p), sharded_parameter(p).requires_grad)
            for length, p in zip(self.gather_lengths(), self._fsdp_params, strict=True)
        )

    @property
    def shard_bytes(self) -> int:
        """Bytes of a rank's shard of the parameters, including padding."""
        pairs = zip(self.gather_lengths(), self.params, strict=True)
        return sum(length * p.dtype.itemsize for length, p in pairs)

    def gather_extensions(self) -> set[str]:
        """Return the tensor subclasses (float8, NF4) among its shards that define their own gather."""
        shards = [p._sharded_local_tensor for p in self._fsdp_params]
        return {type(shard).__name__ for shard in shards if hasattr(shard, "fsdp_pre_all_gather")}

    @property
    def sends(self) -> bool:
        """Whether the unit is sharded over more than one rank."""
        return len(self._param_groups) > 1 or (self.group is not None and self.group.size() > 1)

    def why_left_alone(self) -> str | None:
        """Return why FSDP2's own comms must stay, or None if they can be replaced."""
        if len(self._param_groups) > 1:
            return "several parameter groups, each on a mesh of its own: FSDP2 takes no custom comms"
        if not self.sends:
            return "a shard group of one rank: nothing is sent"
        group = self._param_groups[0]
        known = (collectives.DefaultAllGather, collectives.DefaultReduceScatter, Comm)
        comms = (group._all_gather_comm, group._reduce_scatter_comm)
        custom = [comm for comm in comms if not isinstance(comm, known)]
        if custom:
            return f"has custom comms already: {', '.join(type(comm).__name__ for comm in custom)}"
        return None

    def installed(self) -> Comm | None:
        """Return zeropp's all-gather if it is installed, or None."""
        comm = self._param_groups[0]._all_gather_comm
        return comm if isinstance(comm, Comm) else None

    def install(self, all_gather: Any, reduce_scatter: Any) -> None:
        """Install comms: zeropp's, or any objects with the same `allocate` and `__call__`."""
        self.module.set_custom_all_gather(all_gather)
        self.module.set_custom_reduce_scatter(reduce_scatter)
        self._backward.install()

    def restore(self) -> None:
        """Restore FSDP2's own comms."""
        self.module.set_custom_all_gather(collectives.DefaultAllGather())
        self.module.set_custom_reduce_scatter(collectives.DefaultReduceScatter())
        self.send_unused_as_set()

    def send_unused_while(self, is_needed: Callable[[], bool]) -> None:
        """Reduce parameters without a gradient as zeros in each backward in which `is_needed()`, so that
        reductions have one layout. In other backwards, the user's setting of FSDP2 applies."""
        self._backward.send_unused_while(is_needed)

    def send_unused_as_set(self) -> None:
        """Undo `send_unused_while`, and the wrapper of `install`."""
        self._backward.remove()

    def on_all_reduce(self, react: Callable[[Tensor], None]) -> None:
        """Call `react` with the shard of gradients after each of HSDP's all-reduces over replicas."""
        self.module.set_all_reduce_hook(react)

    @property
    def has_more_uses(self) -> bool:
        """Whether FSDP2 has recorded forwards whose backward has not begun. Read it during a backward.

        FSDP2 also counts evaluations since the last backward.
        """
        # With the user's own backward prefetch, FSDP2 never counts down.
        counts_down = not self.module._get_fsdp_state()._states_to_backward_prefetch
        least = 0 if counts_down else 1
        return any(len(group._post_forward_indices) > least for group in self._param_groups)

    @property
    def device(self) -> torch.device:
        """Device of computation and communication."""
        device: torch.device = self._param_groups[0].device
        return device

    @property
    def is_in_forward(self) -> bool:
        """Whether the unit is in its forward."""
        return bool(self._param_groups[0]._training_state.name == "FORWARD")

    @property
    def has_forward_prefetch(self) -> bool:
        """Whether `set_modules_to_forward_prefetch` was called."""
        return bool(self.module._get_fsdp_state()._states_to_forward_prefetch)

    def set_forward_prefetch(self, units: list[Unit]) -> None:
        """Make FSDP2 gather `units` before this unit computes its forward."""
        self.module.set_modules_to_forward_prefetch([unit.module for unit in units])

    def gather_early(self) -> None:
        """Start a gather of the unit. FSDP2 waits for it before the unit computes."""
        self.module.unshard(async_op=True)

    @property
    def has_early_gather(self) -> bool:
        """Whether FSDP2 has an early gather of the unit, complete or on its way, that it has not used."""
        return any(group._all_gather_result is not None for group in self._param_groups)

    def forget_early_gather(self) -> list[dist.Work]:
        """Make FSDP2 forget an early gather, so that it gathers again before it computes. Returns gathers
        that may still be on their way."""
        works: list[dist.Work] = []
        for group in self._param_groups:
            result, group._all_gather_result = group._all_gather_result, None
            if result is not None and result.all_gather_work is not None:
                works.append(result.all_gather_work)
        return works

    def drop_early_gather(self) -> None:
        """Make FSDP2 forget an early gather, whose weights have changed since. Errors in it are not raised:
        the next gather checks again."""
        for work in self.forget_early_gather():
            if isinstance(work, DiscardableWork):
                work.discard()
            work.wait()  # its buffers are still in use

    def drop_gathered(self) -> None:
        """Make FSDP2 forget gathered weights, used or not. After an evaluation it still has the root's."""
        self.drop_early_gather()
        self.module.reshard()

    @property
    def is_idle(self) -> bool:
        """Whether none of its modules is in forward or backward. A gather is then an early one, or the user
        has called `unshard`."""
        return bool(self.module._get_fsdp_state()._training_state.name == "IDLE")

    def before_forward(self, react: Callable[[], None]) -> list[RemovableHandle]:
        """Call `react` before FSDP2 prepares a forward of any of the unit's modules."""
        # torch.compile would trace the hook into the graph.
        untraced = torch.compiler.disable(react)  # type: ignore[no-untyped-call]
        return [
            module.register_forward_pre_hook(lambda *_: untraced(), prepend=True) for module in self.modules
        ]

    def set_requires_gradient_sync(self, requires_sync: bool) -> None:
        """Set FSDP2's own switch, also if `on_gradient_sync` has replaced it."""
        FSDPModule.set_requires_gradient_sync(self.module, requires_sync, recurse=False)

    def on_load(self, react: Callable[[], None]) -> list[RemovableHandle]:
        """Call `react` after each state-dict load into a module that owns a parameter of the unit."""
        infos = [p._module_info for p in self._fsdp_params]
        owners = {module for info in infos for module in (info.module, *info.shared_modules)}
        return [owner.register_load_state_dict_post_hook(lambda *_: react()) for owner in owners]

    def shares_parameters_with(self, others: Iterable[Unit]) -> bool:
        """Return whether one of `others` has the same FSDP2 parameter group."""
        theirs = {id(group) for other in others for group in other._param_groups}
        return any(id(group) in theirs for group in self._param_groups)


def find_units(model: nn.Module) -> list[Unit]:
    """Return the units of `model` and its submodules in order of `named_modules`: the same on every rank."""
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    check([module for _, module in modules])
    found: dict[int, Unit] = {}
    for name, module in modules:
        state = module._get_fsdp_state()
        if id(state) in found:  # `fully_shard([a, b])` gives both modules one state
            found[id(state)].names.append(_clean(name))
            found[id(state)].modules.append(module)
        elif state._fsdp_param_groups:
            found[id(state)] = Unit([_clean(name)], module, state._fsdp_param_groups)
    return list(found.values())


def _pieces(params: Iterable[Any]) -> tuple[Piece, ...]:
    sizes = [p.padded_sharded_param_size for p in params]
    return tuple(Piece(size.numel(), size[1:].numel() if len(size) > 1 else 1) for size in sizes)


def is_in_backward() -> bool:
    """Return whether the autograd engine runs a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def gather_copies() -> tuple[Any, Any]:
    """Return FSDP2's copy operations around a gather: shards to buffer, and buffer to parameters."""
    return torch.ops.fsdp.all_gather_copy_in, torch.ops.fsdp.split_with_sizes_copy


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS) or ROOT
