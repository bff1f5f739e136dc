"""A wrapper of FSDP2's `post_backward`. It records the reduced parameters, and adds zeros for those without a
gradient.

`post_backward` of a parameter group packs the gradients of its parameters and reduces them. The
reduce-scatter gets only the packed buffer, without the list of parameters in it. So the wrapper computes the
list before FSDP2 packs. It is an instance attribute of the group that hides the method of the class.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from .versions import READER


class PostBackward:
    """The wrapper for the parameter groups of one unit."""

    def __init__(self, param_groups: list[Any]) -> None:
        self._param_groups = param_groups
        self._needs_unused: Callable[[], bool] = lambda: False
        self.reduced: set[int] | None = None
        """Identities of the parameters that the last backward reduced; None before the first."""

    def install(self) -> None:
        """Wrap `post_backward`. A second call has no effect."""
        for group in self._param_groups:
            vars(group)["post_backward"] = MethodType(self._run, group)

    def send_unused_while(self, is_needed: Callable[[], bool]) -> None:
        """Reduce parameters without a gradient as zeros in each backward in which `is_needed()`."""
        self._needs_unused = is_needed
        self.install()

    def remove(self) -> None:
        """Restore the method of the class."""
        self._needs_unused, self.reduced = lambda: False, None
        for group in self._param_groups:
            vars(group).pop("post_backward", None)

    def _run(self, group: Any, *unused: Any) -> None:
        as_set = group.reduce_scatter_unused_params
        group.reduce_scatter_unused_params = sends_unused = as_set or self._needs_unused()
        params = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
        if group.reduce_grads and sends_unused:
            READER.bring_to_one_dtype(params)  # FSDP2 would refuse held gradients and zeros together
        sent = [p for p in params if is_held(p) or (sends_unused and p._unsharded_param.requires_grad)]
        self.reduced = {id(p) for p in sent}
        try:
            type(group).post_backward(group, *unused)
        finally:
            group.reduce_scatter_unused_params = as_set  # the user's setting


def is_held(param: Any) -> bool:
    """Whether FSDP2 holds a full gradient of the parameter, not yet reduced."""
    unsharded = getattr(param, "_unsharded_param", None)  # exists from the first forward on
    return unsharded is not None and not (param.unsharded_accumulated_grad is unsharded.grad is None)
