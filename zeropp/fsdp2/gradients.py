"""Gradients of a unit inside FSDP2: held, reduced as zeros, and added to `.grad` late."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .post_backward import is_held
from .versions import CONTEXT, READER, check_parts, sharded_parameter


class UnitGradients:
    """The part of `Unit` that knows its parameters, and how FSDP2 holds and uses their gradients."""

    names: list[str]
    _param_groups: list[Any]

    @property
    def is_hsdp(self) -> bool:
        """Whether the unit is sharded and replicated (HSDP)."""
        return bool(self._param_groups[0]._is_hsdp)

    @property
    def name(self) -> str:
        """All names."""
        return ", ".join(self.names)

    def gather_lengths(self) -> tuple[int, ...]:
        """Return the elements of each parameter in a rank's shard, including padding, in the order of a
        gather; the same on every rank."""
        return tuple(p.padded_sharded_param_size.numel() for p in self._fsdp_params)

    @property
    def params(self) -> list[nn.Parameter]:
        """The sharded parameters: those of the optimizer."""
        return [sharded_parameter(p) for p in self._fsdp_params]

    def reduced(self) -> int:
        """Return the elements that a rank receives in a reduction of all trained parameters."""
        pairs = zip(self.gather_lengths(), self.params, strict=True)
        return sum(length for length, p in pairs if p.requires_grad)

    @property
    def _fsdp_params(self) -> list[Any]:
        return [p for group in self._param_groups for p in group.fsdp_params]

    @property
    def reduces_gradients(self) -> bool:
        """Whether FSDP2 reduces gradients: False after `set_requires_gradient_sync(False)`."""
        return bool(self._param_groups[0].reduce_grads)

    @property
    def holds_partial_sums(self) -> bool:
        """Whether FSDP2 holds gradients that are not yet reduced over replicas."""
        return any(group._partial_reduce_output is not None for group in self._param_groups)

    @property
    def holds_gradients(self) -> bool:
        """Whether FSDP2 holds gradients that are not yet reduced, or not over replicas."""
        return self.holds_partial_sums or any(is_held(p) for p in self._fsdp_params)

    def drop_held_gradients(self) -> None:
        """Make FSDP2 forget the gradients that it holds."""
        for group in self._param_groups:
            group._partial_reduce_output = None
            for param in filter(is_held, group.fsdp_params):
                param._unsharded_param.grad = None
                if READER.accumulates_apart:
                    param.unsharded_accumulated_grad = None

    def reduce_zeros(self, comm: Any = None) -> None:
        """Run FSDP2's end of a backward in which every gradient is zero. Call it between two backwards.

        FSDP2 scales and converts the result, adds it to `.grad` and calls hooks.

        Args:
            comm: the reduce-scatter; None: the installed one.
        """
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
            # The end of a backward waits for these, but no backward is running.
            events = [*context._last_post_reduce_events.values()]
            for event in (*events, *(reduction.event for reduction in context.reduce_scatter_states)):
                if event is not None:
                    group.device_handle.current_stream().wait_event(event)
            context._last_post_reduce_events.clear()
            context.reduce_scatter_states.clear()
            group.finalize_backward()

    @property
    def most_reductions(self) -> int:
        """Number of reductions that may be on their way (`set_reduce_scatter_max_input_buffers`)."""
        return int(self._param_groups[0].comm_ctx.reduce_scatter_max_input_buffers)

    def takes_gradients_late(self, numel: int) -> bool:
        """Return whether a reduction to `numel` elements may arrive after FSDP2 has used its output: FSDP2
        only adds it to `.grad`, all trained parameters are in it, and no hook reads it."""
        (group,) = self._param_groups
        hooked = group._all_reduce_hook is not None or any(
            p.offload_to_cpu or p.sharded_param._post_accumulate_grad_hooks for p in group.fsdp_params
        )
        return not (self.is_hsdp or hooked) and numel == self.reduced()

    def makes_gradients_of(self, output: Tensor) -> bool:
        """Return whether FSDP2 will make `.grad` a view of `output` without reading it: no parameter has a
        `.grad` to add to, and `output` has the dtype of gradients."""
        trained = [p for p in map(sharded_parameter, self._fsdp_params) if p.requires_grad]
        dtypes = {p.dtype for p in trained} | {p.grad_dtype for p in trained}  # torch 2.15 uses grad_dtype
        return dtypes == {output.dtype} and all(p.grad is None for p in trained)

    def check_gradients_are_of(self, output: Tensor) -> None:
        """Raise if `.grad` is no view of `output`: FSDP2 has then read it before the reduction wrote it."""
        place = output.untyped_storage().data_ptr()
        trained = [p for p in map(sharded_parameter, self._fsdp_params) if p.requires_grad]
        gradients: list[Any] = [p.grad for p in trained]  # a frozen parameter may have an older one
        for gradient in (g._local_tensor for g in gradients if g is not None):
            if gradient.numel() and gradient.untyped_storage().data_ptr() != place:
                raise RuntimeError(
                    f"zeropp: gradients of unit '{self.name}' were read before they were reduced, by this "
                    "version of FSDP2 or by a hook; Config(overlap=False) reduces them at once"
                )

    def add_to_gradients(self, reduced: Tensor) -> None:
        """Add a reduction to `.grad` as FSDP2 does."""
        (group,) = self._param_groups
        start = 0
        for param in READER.reduce_order(group):
            if not sharded_parameter(param).requires_grad:
                continue
            gradient, length = param.sharded_param.grad, param.padded_sharded_param_size.numel()
            if gradient is not None and gradient._local_tensor.numel():
                mine = gradient._local_tensor
                mine += reduced[start : start + mine.numel()].view(mine.shape).to(mine.dtype)
            start += length  # padding included, which the gradient does not have
