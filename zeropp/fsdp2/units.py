"""The adapter: finds the units of an FSDP2 model and puts comms into them. With fsdp2/versions.py the only
file that knows what is private in FSDP2.

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
from .post_backward import PostBackward, is_held
from .versions import CONTEXT, READER, check, check_parts, compute_dtype, sharded_parameter

logger = logging.getLogger("zeropp")

ROOT = "(root)"
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}  # of torch.compile and activation checkpointing


class Unit:
    """One FSDP2 parameter group: the parameters that are gathered and reduced together."""

    def __init__(self, names: list[str], module: FSDPModule, param_groups: list[Any]) -> None:
        self.names = names
        """Names of its modules in the model; several for `fully_shard([a, b])`. `(root)` is all of it."""
        self.module: Any = module
        """The first of them: an nn.Module and an FSDPModule."""
        self.modules: list[Any] = [module]
        """All of them."""
        self._param_groups = param_groups  # one, except with a mesh per parameter
        self._backward = PostBackward(param_groups)

    @property
    def name(self) -> str:
        return ", ".join(self.names)

    @property
    def label(self) -> str:
        """A name that fits into a table."""
        others = len(self.names) - 1
        return f"{self.names[0]} and {others} more" if others > 1 else self.name

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
        return [sharded_parameter(p) for p in self._fsdp_params]

    @property
    def _fsdp_params(self) -> list[Any]:
        return [p for group in self._param_groups for p in group.fsdp_params]

    def trained(self) -> tuple[bool, ...]:
        """Which of its parameters are trained. Asked in every step, like `version`."""
        return tuple(p.sharded_param.requires_grad for p in self._fsdp_params)

    @property
    def frozen(self) -> str | None:
        """How many of its parameters are frozen, in words; None if all are trained."""
        frozen = [p for p in self.params if not p.requires_grad]
        if len(frozen) == len(self.params):
            return "frozen"
        return f"{len(frozen)} of {len(self.params)} parameters frozen" if frozen else None

    @property
    def is_hsdp(self) -> bool:
        return bool(self._param_groups[0]._is_hsdp)

    def version(self) -> list[int]:
        """Moves with in-place operations on a parameter, on all ranks: [Note: Operations on parameters].

        Asked in every step of an optimizer, so of the parameters as FSDP2 knows them, without another look.
        """
        params = [p.sharded_param for p in self._fsdp_params]
        return [0 if p.is_inference() else p._version for p in params]

    def gather_lengths(self) -> tuple[int, ...]:
        """Elements of each parameter in a rank's shard, padding included, in the order in which weights are
        gathered; the same on every rank."""
        return tuple(p.padded_sharded_param_size.numel() for p in self._fsdp_params)

    def reduce_pieces(self) -> tuple[Piece, ...]:
        """The parameters of a rank's shard of gradients, in their order: those that FSDP2 reduces in the
        running backward; before the first one, `trained_pieces`."""
        reduced = self._backward.reduced
        if reduced is None:
            return self.trained_pieces()
        return _pieces(p for p in self._reduce_order if id(p) in reduced)

    def trained_pieces(self) -> tuple[Piece, ...]:
        """The pieces of a reduction in which every trained parameter has a gradient. Before the first
        forward, their order is a guess from torch 2.15 on."""
        return _pieces(p for p in self._reduce_order if sharded_parameter(p).requires_grad)

    @property
    def _reduce_order(self) -> list[Any]:
        return [p for group in self._param_groups for p in READER.reduce_order(group)]

    def gather_dtypes(self) -> set[torch.dtype]:
        """The dtypes that FSDP2 gathers; if there are several, it sends raw bytes."""
        return {compute_dtype(p) for p in self._fsdp_params}

    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype that FSDP2 reduces gradients in, all of them in one; None if nothing is trained."""
        trained = [p for p in self._fsdp_params if sharded_parameter(p).requires_grad]
        dtypes = {p.mp_policy.reduce_dtype or READER.gradient_dtype(p) for p in trained}
        return reduce(torch.promote_types, dtypes) if dtypes else None

    def gathered(self) -> tuple[Weight, ...]:
        """What a rank sends of each parameter in a gather, in its order, unless parameters say themselves
        what they send: see `gather_extensions`."""
        return tuple(
            Weight(length, compute_dtype(p), sharded_parameter(p).requires_grad)
            for length, p in zip(self.gather_lengths(), self._fsdp_params, strict=True)
        )

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

    @property
    def sends(self) -> bool:
        """Whether it is sharded over more than one rank."""
        return len(self._param_groups) > 1 or (self.group is not None and self.group.size() > 1)

    def why_left_alone(self) -> str | None:
        """Why FSDP2's own comms must stay, or None if they can be replaced."""
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
        """zeropp's all-gather, if it is installed."""
        comm = self._param_groups[0]._all_gather_comm
        return comm if isinstance(comm, Comm) else None

    def install(self, all_gather: Any, reduce_scatter: Any) -> None:
        """Put comms in place: ours, or any objects with their `allocate` and `__call__`."""
        self.module.set_custom_all_gather(all_gather)
        self.module.set_custom_reduce_scatter(reduce_scatter)
        self._backward.install()

    def restore(self) -> None:
        """Give the unit back to FSDP2."""
        self.module.set_custom_all_gather(collectives.DefaultAllGather())
        self.module.set_custom_reduce_scatter(collectives.DefaultReduceScatter())
        self.send_unused_as_set()

    def send_unused_while(self, is_needed: Callable[[], bool]) -> None:
        """Reduce parameters without a gradient as zeros in each backward in which `is_needed()`, so that
        reductions have one layout. In others, FSDP2 does what the user has set."""
        self._backward.send_unused_while(is_needed)

    def send_unused_as_set(self) -> None:
        """Undo `send_unused_while`, and what `install` has wrapped."""
        self._backward.remove()

    def on_all_reduce(self, react: Callable[[Tensor], None]) -> None:
        """Call `react` with the shard of gradients whenever it has been reduced over all replicas of HSDP."""
        self.module.set_all_reduce_hook(react)

    @property
    def reduces_gradients(self) -> bool:
        """False while the loop has called `set_requires_gradient_sync(False)`."""
        return bool(self._param_groups[0].reduce_grads)

    @property
    def holds_partial_sums(self) -> bool:
        """Whether FSDP2 has gradients that it was told not to reduce over all replicas."""
        return any(group._partial_reduce_output is not None for group in self._param_groups)

    @property
    def holds_gradients(self) -> bool:
        """Whether FSDP2 has gradients that it was told not to reduce, or not over all replicas."""
        return self.holds_partial_sums or any(is_held(p) for p in self._fsdp_params)

    def drop_held_gradients(self) -> None:
        for group in self._param_groups:
            group._partial_reduce_output = None
            for param in filter(is_held, group.fsdp_params):
                param._unsharded_param.grad = None
                if READER.accumulates_apart:
                    param.unsharded_accumulated_grad = None

    def reduce_zeros(self, comm: Any = None) -> None:
        """Between two backwards: do what FSDP2 does at the end of one in which every gradient is zero, with
        this reduce-scatter (None: the installed one). FSDP2 scales and converts the result, adds it to
        `.grad` and calls hooks."""
        for group in self._param_groups:
            state, context, installed = group._training_state, group.comm_ctx, group._reduce_scatter_comm
            check_parts("FSDPCommContext", context, CONTEXT)
            group._reduce_scatter_comm = installed if comm is None else comm
            try:
                with torch.no_grad():
                    group.post_backward()
            finally:
                group._reduce_scatter_comm = installed
            group._training_state = state
            events = [*context._last_post_reduce_events.values()]
            for event in (*events, *(reduction.event for reduction in context.reduce_scatter_states)):
                if event is not None:
                    group.device_handle.current_stream().wait_event(event)
            context._last_post_reduce_events.clear()
            context.reduce_scatter_states.clear()
            group.finalize_backward()

    @property
    def has_more_uses(self) -> bool:
        """In a backward: whether FSDP2 knows of forwards of the unit whose backward has not begun. It counts
        evaluations since the last backward, too. With a backward prefetch of the user's it does not count
        down."""
        counts_down = not self.module._get_fsdp_state()._states_to_backward_prefetch
        least = 0 if counts_down else 1
        return any(len(group._post_forward_indices) > least for group in self._param_groups)

    @property
    def device(self) -> torch.device:
        """Where it computes, and communicates."""
        device: torch.device = self._param_groups[0].device
        return device

    @property
    def is_in_forward(self) -> bool:
        return bool(self._param_groups[0]._training_state.name == "FORWARD")

    @property
    def has_forward_prefetch(self) -> bool:
        """Whether `set_modules_to_forward_prefetch` was called."""
        return bool(self.module._get_fsdp_state()._states_to_forward_prefetch)

    def set_forward_prefetch(self, units: list[Unit]) -> None:
        self.module.set_modules_to_forward_prefetch([unit.module for unit in units])

    def gather_early(self) -> None:
        """Start to gather it; FSDP2 waits for that before the unit computes."""
        self.module.unshard(async_op=True)

    @property
    def has_early_gather(self) -> bool:
        """Whether FSDP2 has weights of it that it has not used yet, or will have."""
        return any(group._all_gather_result is not None for group in self._param_groups)

    def forget_early_gather(self) -> list[dist.Work]:
        """Have FSDP2 forget weights that were gathered and not used yet: it gathers again before it computes.
        Returns gathers that may still be on their way."""
        works: list[dist.Work] = []
        for group in self._param_groups:
            result, group._all_gather_result = group._all_gather_result, None
            if result is not None and result.all_gather_work is not None:
                works.append(result.all_gather_work)
        return works

    def drop_early_gather(self) -> None:
        """Forget weights that were gathered and not used yet: they are others now. An error in such a gather
        is nobody's: the next one checks again."""
        for work in self.forget_early_gather():
            if isinstance(work, DiscardableWork):
                work.discard()
            work.wait()

    def drop_gathered(self) -> None:
        """Forget gathered weights, used or not. (After an evaluation FSDP2 still has those of the root.)"""
        self.drop_early_gather()
        self.module.reshard()

    @property
    def is_idle(self) -> bool:
        """Whether none of its modules is in forward or backward: a gather is for a later one, or for a user
        who calls `unshard`."""
        return bool(self.module._get_fsdp_state()._training_state.name == "IDLE")

    def before_forward(self, react: Callable[[], None]) -> list[RemovableHandle]:
        """Call `react` before FSDP2 prepares a forward of any of the unit's modules."""
        untraced = torch.compiler.disable(react)  # type: ignore[no-untyped-call]
        return [
            module.register_forward_pre_hook(lambda *_: untraced(), prepend=True) for module in self.modules
        ]

    @property
    def most_reductions(self) -> int:
        """How many reductions may be on their way, as `set_reduce_scatter_max_input_buffers` says."""
        return int(self._param_groups[0].comm_ctx.reduce_scatter_max_input_buffers)

    def takes_gradients_late(self, numel: int) -> bool:
        """Whether a reduction to `numel` elements may arrive after FSDP2 has used it: it only adds it to
        `.grad` of parameters that are all in it, and calls nobody who would look."""
        (group,) = self._param_groups
        hooked = group._all_reduce_hook is not None or any(
            p.offload_to_cpu or p.sharded_param._post_accumulate_grad_hooks for p in group.fsdp_params
        )
        return not (self.is_hsdp or hooked) and numel == self.reduced()

    def makes_gradients_of(self, output: Tensor) -> bool:
        """Whether FSDP2 will not read what a reduce-scatter writes, but make `.grad` of views of it: there is
        none to add to, and it has the right dtype."""
        trained = [p for p in map(sharded_parameter, self._fsdp_params) if p.requires_grad]
        dtypes = {p.dtype for p in trained} | {p.grad_dtype for p in trained}  # from 2.15 on, the latter
        return dtypes == {output.dtype} and all(p.grad is None for p in trained)

    def check_gradients_are_of(self, output: Tensor) -> None:
        """Raise if FSDP2 has read it all the same, before there was anything in it."""
        place = output.untyped_storage().data_ptr()
        gradients = [p.sharded_param.grad for p in self._fsdp_params]
        for gradient in (g._local_tensor for g in gradients if g is not None):
            if gradient.numel() and gradient.untyped_storage().data_ptr() != place:
                raise RuntimeError(
                    f"zeropp: gradients of unit '{self.name}' were read before they were reduced, by this "
                    "version of FSDP2 or by a hook; Config(overlap=False) reduces them at once"
                )

    def add_to_gradients(self, reduced: Tensor) -> None:
        """Add a reduction to `.grad`, as FSDP2 would have."""
        (group,) = self._param_groups
        start = 0
        for param in READER.reduce_order(group):
            if not sharded_parameter(param).requires_grad:
                continue
            gradient, length = param.sharded_param.grad, param.padded_sharded_param_size.numel()
            if gradient is not None and gradient._local_tensor.numel():
                mine = gradient._local_tensor
                mine += reduced[start : start + mine.numel()].view(mine.shape).to(mine.dtype)
            start += length

    def set_requires_gradient_sync(self, requires_sync: bool) -> None:
        """FSDP2's own switch, whoever has taken its place: see `on_gradient_sync`."""
        FSDPModule.set_requires_gradient_sync(self.module, requires_sync, recurse=False)

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
    check([module for _, module in modules])
    found: dict[int, Unit] = {}
    for name, module in modules:
        state = module._get_fsdp_state()
        if id(state) in found:
            found[id(state)].names.append(_clean(name))
            found[id(state)].modules.append(module)
        elif state._fsdp_param_groups:
            found[id(state)] = Unit([_clean(name)], module, state._fsdp_param_groups)
    return list(found.values())


def _pieces(params: Iterable[Any]) -> tuple[Piece, ...]:
    sizes = [p.padded_sharded_param_size for p in params]
    return tuple(Piece(size.numel(), size[1:].numel() if len(size) > 1 else 1) for size in sizes)


def is_in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def gather_copies() -> tuple[Any, Any]:
    """FSDP2's operations around an all-gather: shards into the buffer, and the buffer into parameters."""
    return torch.ops.fsdp.all_gather_copy_in, torch.ops.fsdp.split_with_sizes_copy


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS) or ROOT
