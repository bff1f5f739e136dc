"""Optimizer steps: what is checked before one changes weights, and which units are told after it.

[Note: Cost of a step]
torch's hooks are global: they run for every optimizer of the process. With the optimizer in backward, that
is one for each parameter. So a step costs in proportion to the parameters of its own optimizer, whatever the
size of the model: each is looked up in a table, which also remembers the parameters that are not ours.

[Note: Closures]
`optimizer.step(closure)` computes gradients inside the step: the last micro-batch, or several times all of it
(LBFGS), or at other weights (SAM). What is checked before a step is then checked after each call of the
closure, before the optimizer goes on; and an optimizer that calls it again has changed weights in between.

[Note: Hooks that stay]
torch iterates over its hooks while they run, and a model may be collected as garbage in the middle of that: a
hook that went with its model would break the iteration, in a step of another model. So the process has two
hooks, made once and never removed, which ask those who watch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..comm import Alarm
from .units import Unit


class WatchedUnit(Protocol):
    """A unit whose parameters optimizers change."""

    unit: Unit

    @property
    def has_pending(self) -> bool: ...

    def after_step(self, changed: Collection[int]) -> None: ...


class Entry(NamedTuple):
    """What is known of a parameter."""

    parameter: weakref.ref[nn.Parameter]
    comms: WatchedUnit | None = None
    """Those of its unit; None: it is not ours."""
    number: int = 0
    """Which parameter of the unit it is."""


class Handle(Protocol):
    """Ends something."""

    def remove(self) -> None: ...


class OptimizerSteps:
    """Watches the optimizer steps that concern some units, as long as somebody holds it."""

    def __init__(
        self,
        unit_comms: Iterable[WatchedUnit],
        alarm: Alarm,
        then: Callable[[Optimizer], None] | None = None,
    ) -> None:
        """`then` is called after each step that concerns these units, when they have been told."""
        self._unit_comms = list(unit_comms)
        self._alarm = alarm
        self._then = then
        self._table: dict[int, Entry] = {}

    def register(self) -> list[Handle]:
        """Start; the handles end it."""
        _listen()
        _watchers[:] = [ref for ref in _watchers if ref() is not None]
        _watchers.append(weakref.ref(self))
        loads = [comms.unit.on_load(self._table.clear) for comms in self._unit_comms]
        return [_End(self), *(hook for hooks in loads for hook in hooks)]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before a step: args are (optimizer, closure or nothing). What it returns replaces them."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._check(optimizer)
            return args, kwargs
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
        pending = [comms.unit.name for comms, _ in self._changed_by(optimizer) if comms.has_pending]
        if pending:
            raise RuntimeError(
                f"optimizer.step() while gradients of {', '.join(pending)} are not summed over all nodes: "
                "call set_requires_cross_node_sync(True) before the backward of the last micro-batch, or "
                "flush() after it"
            )

    def _after(self, optimizer: Optimizer) -> None:
        if self._weights_changed(optimizer) and self._then is not None:
            self._then(optimizer)

    def _weights_changed(self, optimizer: Optimizer) -> bool:
        """Whether there are any of ours."""
        concerned = self._changed_by(optimizer)
        for comms, changed in concerned:
            comms.after_step(changed)
        return bool(concerned)

    def _changed_by(self, optimizer: Optimizer) -> list[tuple[WatchedUnit, set[int]]]:
        """The units that the optimizer can change, and which of their parameters: what is frozen stays as it
        is."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if not all(self._knows(p) for p in params):
            self._fill_table(params)
        changed: dict[int, tuple[WatchedUnit, set[int]]] = {}
        for p in params:
            _, comms, number = self._table[id(p)]
            if comms is not None and (p.requires_grad or p.grad is not None):
                changed.setdefault(id(comms), (comms, set()))[1].add(number)
        return list(changed.values())

    def _knows(self, p: nn.Parameter) -> bool:
        entry = self._table.get(id(p))
        return entry is not None and entry.parameter() is p  # another one may live where a dead one did

    def _fill_table(self, params: list[nn.Parameter]) -> None:
        """Ask FSDP2 for all parameters anew; those of `params` that are not among them belong to others."""
        self._table.update((id(p), Entry(weakref.ref(p))) for p in params)
        for comms in self._unit_comms:
            for number, p in enumerate(comms.unit.params):
                self._table[id(p)] = Entry(weakref.ref(p), comms, number)


_watchers: list[weakref.ref[OptimizerSteps]] = []


def watching() -> list[OptimizerSteps]:
    """Everybody who is told of optimizer steps in this process."""
    return [steps for ref in _watchers if (steps := ref()) is not None]


@functools.cache
def _listen() -> None:
    """See [Note: Hooks that stay]."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
    for steps in watching():
        args, kwargs = steps._before(optimizer, args, kwargs)
    return args, kwargs


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for steps in watching():
        steps._after(optimizer)


class _End:
    def __init__(self, steps: OptimizerSteps) -> None:
        self._steps = weakref.ref(steps)

    def remove(self) -> None:
        _watchers[:] = [ref for ref in _watchers if ref is not self._steps]
