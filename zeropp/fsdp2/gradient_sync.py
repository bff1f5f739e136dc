"""What takes the place of FSDP2's `set_requires_gradient_sync`, the switch that every `no_sync` turns."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def on_gradient_sync(
    model: nn.Module, react: Callable[[set[nn.Module], bool], None]
) -> list[InsteadOfGradientSync]:
    """Call `react` with the modules concerned instead of their `set_requires_gradient_sync`."""
    return [
        InsteadOfGradientSync(module, react) for module in model.modules() if isinstance(module, FSDPModule)
    ]


class InsteadOfGradientSync:
    """Takes the place of `set_requires_gradient_sync` of one module, until it is removed."""

    NAME = "set_requires_gradient_sync"

    def __init__(self, module: FSDPModule, react: Callable[[set[nn.Module], bool], None]) -> None:
        self._module: Any = weakref.ref(module)
        self._react = react
        vars(module)[self.NAME] = self

    def __call__(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        module = self._module()
        self._react(set(module.modules()) if recurse else {module}, requires_gradient_sync)

    def remove(self) -> None:
        module = self._module()
        if module is not None and vars(module).get(self.NAME) is self:
            del vars(module)[self.NAME]
