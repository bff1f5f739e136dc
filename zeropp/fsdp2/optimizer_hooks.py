"""Hooks on optimizer steps: checks before a step, and a notification of changed units after it.

[Note: Cost of a step]
torch's hooks are global: they run for every optimizer of the process. With the optimizer in backward, there
is one optimizer for each parameter. So the cost of a step must be proportional to the parameters of its own
optimizer, and not to the model: a table holds the unit of each parameter, and also the parameters that belong
to no unit of zeropp.

[Note: Closures]
`optimizer.step(closure)` computes gradients inside the step: the last micro-batch, or the whole batch several
times (LBFGS), or at other weights (SAM). The checks then run after each call of the closure, before the
optimizer continues. An optimizer that calls the closure again has changed weights in between.

[Note: Hooks that stay]
torch iterates over its hooks while they run, and the garbage collector may free a model during the iteration.
A hook that is removed with its model would break the iteration, in a step of another model. So the process
has two hooks, which are created once and never removed. They call all watchers that are alive.
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
    """The unit of a parameter."""

    parameter: weakref.ref[nn.Parameter]
    comms: WatchedUnit | None = None
    """None: the parameter belongs to no unit of zeropp."""
    number: int = 0
    """Index of the parameter in the unit."""


class Handle(Protocol):
    """A registration that `remove` ends."""

    def remove(self) -> None: ...


class OptimizerSteps:
    """Watches optimizer steps that change parameters of some units, until it is freed or removed."""

    def __init__(
        self,
        unit_comms: Iterable[WatchedUnit],
        alarm: Alarm,
        then: Callable[[Optimizer], None] | None = None,
    ) -> None:
        """`then` runs after each step that changes these units, after their own `after_step`."""
        self._unit_comms = list(unit_comms)
        self._alarm = alarm
        self._then = then
        self._table: dict[int, Entry] = {}

    def register(self) -> list[Handle]:
        """Start to watch. The returned handles end it."""
        _listen()
        _watchers[:] = [ref for ref in _watchers if ref() is not None]  # models that were freed
        _watchers.append(weakref.ref(self))
        # A load may replace parameters (assign=True).
        loads = [comms.unit.on_load(self._table.clear) for comms in self._unit_comms]
        return [_End(self), *(hook for hooks in loads for hook in hooks)]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Check before a step. `args` is (optimizer,) or (optimizer, closure); the result replaces both."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._check(optimizer)
            return args, kwargs
        checked = self._checked(closure, optimizer)
        if len(args) > 1:
            return (args[0], checked, *args[2:]), kwargs
        return args, kwargs | {"closure": checked}

    def _checked(self, closure: Callable[..., Any], optimizer: Optimizer) -> Callable[..., Any]:
        """Return `closure` with a check after each call; see [Note: Closures]."""
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
        """Notify the units that `optimizer` can change. Returns whether there are any."""
        concerned = self._changed_by(optimizer)
        for comms, changed in concerned:
            comms.after_step(changed)
        return bool(concerned)

    def _changed_by(self, optimizer: Optimizer) -> list[tuple[WatchedUnit, set[int]]]:
        """Return the units that the optimizer can change, and the indices of these parameters. A frozen
        parameter without a gradient does not count."""
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
        return entry is not None and entry.parameter() is p  # a new parameter may have the id of a freed one

    def _fill_table(self, params: list[nn.Parameter]) -> None:
        """Read all parameters from FSDP2 again. `params` that are not among them belong to no unit."""
        self._table.update((id(p), Entry(weakref.ref(p))) for p in params)
        for comms in self._unit_comms:
            for number, p in enumerate(comms.unit.params):
                self._table[id(p)] = Entry(weakref.ref(p), comms, number)


_watchers: list[weakref.ref[OptimizerSteps]] = []


def watching() -> list[OptimizerSteps]:
    """Return all watchers of optimizer steps in this process."""
    return [steps for ref in _watchers if (steps := ref()) is not None]


@functools.cache
def _listen() -> None:
    """Register the global hooks, once; see [Note: Hooks that stay]."""
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
        self._steps = weakref.ref(steps)  # the object in `_watchers`: Python reuses weak references

    def remove(self) -> None:
        _watchers[:] = [ref for ref in _watchers if ref is not self._steps]
