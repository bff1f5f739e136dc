"""A replacement of FSDP2's `set_requires_gradient_sync`, the switch behind every `no_sync`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def on_gradient_sync(
    model: nn.Module, react: Callable[[set[nn.Module], bool], None]
) -> list[InsteadOfGradientSync]:
    """Replace `set_requires_gradient_sync` of all FSDP modules by `react`, which gets the modules and the
    value."""
    return [
        InsteadOfGradientSync(module, react) for module in model.modules() if isinstance(module, FSDPModule)
    ]


class InsteadOfGradientSync:
    """The replacement of `set_requires_gradient_sync` of one module. `remove` restores the method."""

    NAME = "set_requires_gradient_sync"

    def __init__(self, module: FSDPModule, react: Callable[[set[nn.Module], bool], None]) -> None:
        self._module: Any = weakref.ref(module)  # the module holds this object: no cycle
        self._react = react
        vars(module)[self.NAME] = self  # an instance attribute hides the method

    def __call__(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        module = self._module()
        self._react(set(module.modules()) if recurse else {module}, requires_gradient_sync)

    def remove(self) -> None:
        """Restore FSDP2's method, unless another object has replaced it since."""
        module = self._module()
        if module is not None and vars(module).get(self.NAME) is self:
            del vars(module)[self.NAME]
