"""Detection of a `.grad` that disappears while gradients are pending.

[Note: Dropped or taken]
Gradients accumulated without cross-node sync (pending gradients) are a part of `.grad` that has not arrived
yet. If `.grad` becomes None, they must be dropped (zero_grad) or kept (a hook consumed `.grad`). None alone
does not show which:

    zero_grad()                        `listen`, below, reports it: pending gradients are dropped at once.
    a hook takes `.grad` in backward   `.grad` is None when backward ends. The hook took zeros, so pending
                                       gradients stay.
    `.grad` = None between backwards   An error in the next backward. If `.grad` was dropped, the loop must
                                       call `drop_pending_gradients()`.

torch has no hooks around zero_grad(), so the first `apply` wraps `Optimizer.zero_grad` and
`Module.zero_grad`. An optimizer that overrides zero_grad() without a call of the base class falls under the
third case. The training loop does all of this on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Protocol
from weakref import WeakSet

from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from ..comm.reduce_scatter import Gradients


class Listener(Protocol):
    """An object that `listen` accepts. The protocol needs `__hash__` because listeners are in a WeakSet."""

    def gradients_zeroed(self, params: set[int]) -> None:
        """React to a zero_grad() of the parameters with these ids."""

    def __hash__(self) -> int: ...


_listeners: WeakSet[Listener] = WeakSet()


def listen(listener: Listener) -> None:
    """Call `listener.gradients_zeroed` after each zero_grad() in this process, while `listener` is alive."""
    _tell_of(Optimizer, lambda optimizer: (p for group in optimizer.param_groups for p in group["params"]))
    _tell_of(nn.Module, nn.Module.parameters)
    _listeners.add(listener)


def _tell_of(owner: type, params_of: Callable[[Any], Iterable[Tensor]]) -> None:
    """Wrap `owner.zero_grad`, once per process."""
    original: Any = owner.zero_grad  # type: ignore[attr-defined]
    if hasattr(original, "tells_zeropp"):
        return

    @wraps(original)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _listeners:
            params = {id(p) for p in params_of(self)}
            for listener in list(_listeners):
                listener.gradients_zeroed(params)

    zero_grad.tells_zeropp = True  # type: ignore[attr-defined]
    owner.zero_grad = zero_grad  # type: ignore[attr-defined]


class GradientWatch(Gradients):
    """Checks that `.grad` of a unit's parameters has not disappeared since the last backward:
    [Note: Dropped or taken]."""

    def __init__(
        self, unit: str, params: Callable[[], list[nn.Parameter]], waits_for_next_use: Callable[[], bool]
    ) -> None:
        self._unit, self._params, self._waits_for_next_use = unit, params, waits_for_next_use
        self._had_grad: set[int] = set()
        """Identities of parameters with a gradient at the end of the last backward."""
        self._zeroed: set[int] = set()
        """Identities of parameters for which zero_grad() ran since then."""

    def waits_for_next_use(self) -> bool:
        return self._waits_for_next_use()

    def on_deferred(self) -> None:
        self._had_grad, self._zeroed = set(), set()
        # Hooks that take `.grad` run later in this backward.
        Variable._execution_engine.queue_callback(self._at_end_of_backward)

    def _at_end_of_backward(self) -> None:
        self._had_grad = {id(p) for p in self._params() if p.grad is not None}

    def zeroed(self, params: set[int]) -> bool:
        """Record a zero_grad() of `params`. Returns whether all trained parameters of the unit are zeroed."""
        self._zeroed |= params
        is_whole = all(id(p) in self._zeroed for p in self._params() if p.requires_grad)
        if is_whole:
            self._zeroed = set()
        return is_whole

    def raise_if_gone(self) -> None:
        # `_zeroed`, too: zero_grad(set_to_none=False) leaves zeros instead of None.
        if any(id(p) in self._had_grad and (p.grad is None or id(p) in self._zeroed) for p in self._params()):
            raise RuntimeError(
                f".grad of unit '{self._unit}' is gone, in part or whole, since the last micro-batch without "
                "cross-node sync, and the rest of it is still pending inside the node: call "
                "drop_pending_gradients() if all of it was dropped (zero_grad() for all parameters of the "
                "unit does that); if a hook consumed it, consume it after the last micro-batch, with sync on"
            )
