"""A FakeTensorMode with a fast path for the most frequent operations of a step.

Fake tensors have shapes and no content. For every operation, torch's FakeTensorMode looks for a rule among
many and hashes all arguments to look up a cached result, which takes several times as long as a view. The
operations listed here need no rule: torch computes them on the meta tensor inside each fake tensor.
Arithmetic is not listed, because torch's own cache is faster for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

aten, c10d, profiler = torch.ops.aten, torch.ops.c10d, torch.ops.profiler
CPU = torch.device("cpu")
"""Device that the tensors of a dry run report."""

FILLS = {aten.fill_.Scalar, aten.normal_.default, aten.uniform_.default, aten.zero_.default}
"""Operations that change only content, which fake tensors do not have."""
VIEWS = {
    aten._unsafe_view.default,
    aten.alias.default,
    aten.as_strided.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten.view.dtype,
}
COPIES = {aten.add_.Scalar, aten.add_.Tensor, aten.clone.default, aten.copy_.default}
MESSAGES = {c10d.recv_.default, c10d.send.default}
LABELS = {profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction}
QUICK = FILLS | VIEWS | COPIES | MESSAGES | LABELS


class QuickFakeTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """FakeTensorMode with the same results, and less time for the operations in `QUICK`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in QUICK or not all(map(self._is_plain, args)):
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        if func in FILLS:
            return args[0]
        with in_kernel_invocation_manager(self):
            out = func(*args, **(kwargs or {}))
        if isinstance(out, list):
            return [self._fake(part) for part in out]
        return self._fake(out)

    def _is_plain(self, arg: Any) -> bool:
        """Return whether the argument is no tensor, or a CPU tensor without a known value."""
        if type(arg) is FakeTensor:
            return arg.fake_device == CPU and arg.constant is None and arg.fake_mode is self
        return not isinstance(arg, Tensor)

    def _fake(self, out: Any) -> Any:
        """Return a new meta tensor as a fake tensor, and anything else unchanged."""
        return FakeTensor(self, out, CPU) if type(out) is Tensor else out
