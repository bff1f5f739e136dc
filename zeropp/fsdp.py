"""The adapter: finds the units of an FSDP2 model and puts comms into them. The only file that knows FSDP2
(torch 2.13), and the only one that reads its private attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.utils.hooks import RemovableHandle

from .comm import AllGather, ReduceScatter

ROOT = "(root)"
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}  # of torch.compile and activation checkpointing
REPLACEABLE = (DefaultAllGather, DefaultReduceScatter, AllGather, ReduceScatter)


class Unit:
    """One FSDP2 parameter group: the parameters that are gathered and reduced together."""

    def __init__(self, names: list[str], module: FSDPModule, param_groups: list[Any]) -> None:
        self.names = names
        """Of its modules in the model; several for `fully_shard([a, b])`. `(root)` is the model itself."""
        self._module = module
        self._param_groups = param_groups  # one, except with a mesh per parameter
        self._sent_unused = bool(param_groups[0].reduce_scatter_unused_params)

    @property
    def name(self) -> str:
        return ", ".join(self.names)

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that the unit is sharded over; None if it is only replicated."""
        return getattr(self._param_groups[0].mesh_info, "shard_process_group", None)

    @property
    def params(self) -> list[nn.Parameter]:
        """The sharded parameters, as the optimizer knows them."""
        return [p.sharded_param for group in self._param_groups for p in group.fsdp_params]

    @property
    def is_frozen(self) -> bool:
        return not any(p.requires_grad for p in self.params)

    @property
    def is_hsdp(self) -> bool:
        return bool(self._param_groups[0]._is_hsdp)

    def is_changed_by(self, optimizer_params: set[int]) -> bool:
        """Whether an optimizer with these parameters (by id) can change the unit's weights."""
        return any(id(p) in optimizer_params and (p.requires_grad or p.grad is not None) for p in self.params)

    def shard_lengths(self) -> list[int]:
        """Elements of each parameter in a rank's shard, padding included, the same on every rank.

        The layout of what is gathered, and of what is reduced if all parameters have gradients."""
        return [
            p.padded_sharded_param_size.numel() for group in self._param_groups for p in group.fsdp_params
        ]

    def gather_dtypes(self) -> set[torch.dtype]:
        """The dtypes that FSDP2 gathers; if there are several, it sends raw bytes."""
        cast_to = self._param_groups[0].mp_policy.param_dtype
        return {cast_to if cast_to and p.is_floating_point() else p.dtype for p in self.params}

    def has_no_gradients(self) -> bool:
        return all(p.grad is None for p in self.params)

    def why_left_alone(self) -> str | None:
        """Why FSDP2's own comms must stay, or None if they can be replaced."""
        if len(self._param_groups) > 1:
            return "several parameter groups, each on a mesh of its own: FSDP2 takes no custom comms"
        if self.group is None or self.group.size() == 1:
            return "a shard group of one rank: nothing is sent"
        group = self._param_groups[0]
        custom = [
            c for c in (group._all_gather_comm, group._reduce_scatter_comm) if type(c) not in REPLACEABLE
        ]
        if custom:
            return f"has custom comms already: {', '.join(type(comm).__name__ for comm in custom)}"
        return None

    def installed(self) -> AllGather | None:
        """Our all-gather, if it is in place."""
        comm = self._param_groups[0]._all_gather_comm
        return comm if isinstance(comm, AllGather) else None

    def install(self, all_gather: AllGather, reduce_scatter: ReduceScatter) -> None:
        self._module.set_custom_all_gather(all_gather)  # type: ignore[arg-type]  # any object will do
        self._module.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]

    def restore(self) -> None:
        """Give the unit back to FSDP2."""
        self._module.set_custom_all_gather(DefaultAllGather())
        self._module.set_custom_reduce_scatter(DefaultReduceScatter())
        self._module.set_reduce_scatter_unused_params(self._sent_unused, recurse=False)

    def send_unused_gradients(self) -> None:
        """Reduce parameters without a gradient as zeros, so that every reduction has the same layout."""
        self._module.set_reduce_scatter_unused_params(True, recurse=False)

    def on_load(self, react: Callable[[], None]) -> list[RemovableHandle]:
        """Call `react` after a state-dict load into any module that owns a parameter of the unit."""
        infos = [p._module_info for group in self._param_groups for p in group.fsdp_params]
        owners = {module for info in infos for module in (info.module, *info.shared_modules)}
        return [owner.register_load_state_dict_post_hook(lambda *_: react()) for owner in owners]

    def shares_parameters_with(self, others: Iterable[Unit]) -> bool:
        theirs = {id(group) for other in others for group in other._param_groups}
        return any(id(group) in theirs for group in self._param_groups)


def find_units(model: nn.Module) -> list[Unit]:
    """The units of `model` and of the modules in it, in order of `named_modules`: the same on every rank."""
    found: dict[int, Unit] = {}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        if id(state) in found:
            found[id(state)].names.append(_clean(name))
        elif state._fsdp_param_groups:
            found[id(state)] = Unit([_clean(name)], module, state._fsdp_param_groups)
    return list(found.values())


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS) or ROOT
