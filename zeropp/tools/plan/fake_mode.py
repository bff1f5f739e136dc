"""Fake tensors, which have shapes and no content, with a short way for the operations that a step has most.

torch's FakeTensorMode asks of every operation which of many rules it falls under, and describes all of its
arguments to find an answer that it has given before: several times the work of a view. What is named here
needs no rule. torch itself computes it of tensors on the meta device, which fake tensors are inside.
Arithmetic is not named: for that, torch's own way is the shorter one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

aten, c10d, profiler = torch.ops.aten, torch.ops.c10d, torch.ops.profiler
CPU = torch.device("cpu")
"""Where the tensors of a dry run say that they are."""

FILLS = {aten.fill_.Scalar, aten.normal_.default, aten.uniform_.default, aten.zero_.default}
"""They change content only, and there is none."""
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
    """FakeTensorMode, and sooner done with what is in `QUICK`. The same comes out."""

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
        """Whether it is no tensor at all, or one of which nothing but the shape is known."""
        if type(arg) is FakeTensor:
            return arg.fake_device == CPU and arg.constant is None and arg.fake_mode is self
        return not isinstance(arg, Tensor)

    def _fake(self, out: Any) -> Any:
        """A new tensor, as a fake one; all else as it is."""
        return FakeTensor(self, out, CPU) if type(out) is Tensor else out
