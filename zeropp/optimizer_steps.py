"""Optimizer steps: what is checked before one changes weights, and which units are told after it.

[Note: Cost of a step]
torch's hooks are global: they run for every optimizer of the process. With the optimizer in backward, that
is one for each parameter. So a step costs in proportion to the parameters of its own optimizer, whatever the
size of the model: each is looked up in a table, which also remembers the parameters that are not ours.

[Note: Closures]
`optimizer.step(closure)` computes gradients inside the step: the last micro-batch, or several times all of it
(LBFGS), or at other weights (SAM). What is checked before a step is then checked after each call of the
closure, before the optimizer goes on; and an optimizer that calls it again has changed weights in between.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .comm import Alarm
from .unit_comms import UnitComms


class OptimizerSteps:
    """Watches the optimizer steps that concern some units, as long as somebody holds it."""

    def __init__(self, unit_comms: Iterable[UnitComms], alarm: Alarm) -> None:
        self._unit_comms = [comms for comms in unit_comms if comms.pair is not None]
        self._alarm = alarm
        self._table: dict[int, tuple[weakref.ref[nn.Parameter], UnitComms | None]] = {}

    def register(self) -> list[RemovableHandle]:
        """Start; the handles end it."""
        me = weakref.ref(self)

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            alive = me()
            return None if alive is None else alive._before(optimizer, args, kwargs)

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            alive = me()
            if alive is not None:
                alive._weights_changed(optimizer)

        handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        for handle in handles:
            weakref.finalize(self, handle.remove)
        loads = [comms.unit.on_load(self._table.clear) for comms in self._unit_comms]
        return [*handles, *(hook for hooks in loads for hook in hooks)]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A step's pre-hook: args are (optimizer, closure or nothing). What it returns replaces them."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._check(optimizer)
            return None
        checked = self._checked(closure, optimizer)
        if len(args) > 1:
            return (args[0], checked, *args[2:]), kwargs
        return args, kwargs | {"closure": checked}

    def _checked(self, closure: Callable[..., Any], optimizer: Optimizer) -> Callable[..., Any]:
        """See [Note: Closures]."""
        called = False

        @functools.wraps(closure)
        def checked(*args: Any, **kwargs: Any) -> Any:
            nonlocal called
            if called:
                self._weights_changed(optimizer)
            called = True
            result = closure(*args, **kwargs)
            self._check(optimizer)
            return result

        return checked

    def _check(self, optimizer: Optimizer) -> None:
        self._alarm.raise_if_known()
        pending = [comms.unit.name for comms in self._changed_by(optimizer) if comms.has_pending]
        if pending:
            raise RuntimeError(
                f"optimizer.step() while gradients of {', '.join(pending)} are not summed over all nodes: "
                "call set_requires_cross_node_sync(True) before the backward of the last micro-batch, or "
                "flush() after it"
            )

    def _weights_changed(self, optimizer: Optimizer) -> None:
        for comms in self._changed_by(optimizer):
            if comms.pair is not None:
                comms.pair.all_gather.after_step()

    def _changed_by(self, optimizer: Optimizer) -> Iterable[UnitComms]:
        """The units that the optimizer can change: what is frozen stays as it is."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if not all(self._knows(p) for p in params):
            self._fill_table(params)
        changed: dict[int, UnitComms] = {}
        for p in params:
            _, comms = self._table[id(p)]
            if comms is not None and (p.requires_grad or p.grad is not None):
                changed[id(comms)] = comms
        return changed.values()

    def _knows(self, p: nn.Parameter) -> bool:
        entry = self._table.get(id(p))
        return entry is not None and entry[0]() is p  # another one may live where a dead one did

    def _fill_table(self, params: list[nn.Parameter]) -> None:
        """Ask FSDP2 for all parameters anew; those of `params` that are not among them belong to others."""
        self._table.update((id(p), (weakref.ref(p), None)) for p in params)
        for comms in self._unit_comms:
            self._table.update((id(p), (weakref.ref(p), comms)) for p in comms.unit.params)
