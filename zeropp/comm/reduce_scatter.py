"""The collective of a unit's gradients, in the place of FSDP2's reduce-scatter. reduction.py has its hops.

[Note: Accumulation]
While cross-node sync is deferred, hop 2 is left out: the node slice adds up (`pending`), and FSDP2 gets zeros
to add to the sharded gradient. The next reduction with sync sends the sum. If the forward uses a unit several
times, the last reduction of the backward sends it. `pending` is a part of `.grad` that has not arrived yet:
[Note: Dropped or taken] in fsdp2/zero_grad.py. All micro-batches must have one buffer layout;
post_backward.py sends zeros for parameters without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ..config import CodecName, Config
from ..quant import QUANTIZABLE_DTYPES
from ..topology import Hop, HopName
from .bf16_ring import RingReduction
from .chunks import ChunkPolicy, Piece
from .error_feedback import Feedback
from .execution import Comm, Execution, Inline, Transfer
from .layout import ReduceLayouts, reduce_chunks, same_fields
from .reduction import Chunk, Reduction, scale_of
from .wire import Wire

FEEDBACK_FIELDS = (
    "error_feedback",
    "gradients_in_node",
    "gradients_across",
    "rotates",
    "block_size",
    "chunks",
    "route",
    "node_size",
)
"""Fields of Config that determine the meaning of stored errors."""


class GradientSync(Enum):
    """What the next backward of a unit does with gradients; see [Note: Accumulation]."""

    ACROSS = "gradients cross nodes"
    DEFERRED = "gradients stay in the node; FSDP2 would have reduced them"
    DEFERRED_BY_NO_SYNC = "gradients stay in the node; FSDP2's no_sync would have sent nothing, either"


class Gradients:
    """State of a unit's gradients outside of its comm. This one never defers."""

    sync = GradientSync.ACROSS

    def on_deferred(self) -> None:
        """Gradients of the unit are pending from now on."""

    def raise_if_gone(self) -> None:
        """Raise if `.grad`, of which pending gradients are a part, is gone. Runs before more are added."""

    def waits_for_next_use(self) -> bool:
        """With sync: whether another reduction of this backward sends pending gradients."""
        return False


class ReduceScatter(Comm):
    """Reduces the gradients of one unit."""

    def __init__(
        self,
        wire: Wire,
        hops: tuple[Hop, ...],
        config: Config,
        gradients: Gradients | None = None,
        pieces: Callable[[], tuple[Piece, ...]] = tuple,
        execution: Execution | None = None,
    ) -> None:
        """Make a comm for `hops`: (in-node, across), or the only one.

        Args:
            pieces: the parameters of a shard in its order; empty if unknown. Called in every reduction: FSDP2
                knows the order only in training, and not all parameters have gradients.
            execution: how reductions run. A reduction is complete on return with `Inline` only.
        """
        self.wire = wire
        self.hops = hops
        self.config = config
        self.gradients = gradients or Gradients()
        self.pieces = pieces
        self.execution: Execution = execution or Inline()
        self.codec_names: dict[HopName, CodecName] = {
            "in-node": config.gradients_in_node,
            "across": config.gradients_across,
            "flat": config.gradients_across,  # Config checks that both are the same
        }
        self.feedback = Feedback(wire.unit) if config.error_feedback and self.can_defer else None
        self.calls = 0
        """Reductions so far: the number of the next one."""
        self.pending: Tensor | None = None
        """See [Note: Accumulation]. [N, S], in the dtype of Config.gradients_pending."""
        self._pending_dtype = torch.float32 if config.gradients_pending == "fp32" else torch.bfloat16
        self._layouts = ReduceLayouts(partial(reduce_chunks, wire, hops, config, self.codec_names))

    @property
    def can_defer(self) -> bool:
        """Whether cross-node sync can be deferred: there is an across hop, and it comes last."""
        return self.hops[-1].name == "across"

    def pending_bytes(self, numel: int) -> int:
        """Bytes of pending gradients for rows of `numel` elements."""
        return self.hops[-1].size * numel * self._pending_dtype.itemsize if self.can_defer else 0

    def error_bytes(self, pieces: tuple[Piece, ...]) -> int:
        """Bytes of stored errors after the first reduction of these pieces."""
        if self.feedback is None:
            return 0
        chunks = self._layouts.of(torch.float32, pieces, False)
        stored = [chunk.errors.kept.row_bytes for chunk in chunks if chunk.errors is not None]
        return self.hops[-1].size * sum(stored)

    def take_over(self, other: ReduceScatter) -> None:
        """Continue with the count of `other`, and with its stored errors if they mean the same here."""
        self.calls = other.calls
        if self.feedback is not None and same_fields(self.config, other.config, FEEDBACK_FIELDS):
            self.feedback = other.feedback

    def state_dict(self) -> dict[str, Any]:
        """Number of reductions, and stored errors by chunk."""
        return {"calls": self.calls, "errors": {} if self.feedback is None else self.feedback.copies()}

    def load_state_dict(self, calls: int, errors: dict[int, Tensor]) -> None:
        """Continue from a saved state; without errors they start at zero."""
        self.calls = calls
        if self.feedback is not None:
            self.feedback.kept = {chunk: kept.clone() for chunk, kept in errors.items()}

    def drop_pending(self) -> None:
        self.pending = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
        *,
        is_flush: bool = False,
    ) -> dist.Work | None:
        """Reduce as FSDP2 asks. is_flush: the input is zeros, to send pending gradients across nodes."""
        sync = GradientSync.ACROSS if is_flush else self.gradients.sync
        if not is_flush and sync is not GradientSync.DEFERRED_BY_NO_SYNC:
            self.wire.count_baseline("reduce_scatter", output_tensor.numel())
        codec = self.codec_names[self.hops[0].name]
        is_flat = self.hops[0].name == "flat"
        if (is_flat and codec == "none") or input_tensor.dtype not in QUANTIZABLE_DTYPES:
            # The backend's own, counted as the ring that it should be: gloo sends twice as much.
            self.wire.count_ring("reduce_scatter", "flat", group, output_tensor.nbytes)
            sent: dist.Work | None = dist.reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
            return sent
        if output_tensor.numel() == 0:
            return None
        self.wire.check(input_tensor.device)
        rows, out = input_tensor.view(self.wire.topology.size, -1), output_tensor.view(1, -1)
        if is_flat and codec == "bf16":
            cut = ChunkPolicy.of(self.config.chunks)
            transfer: Transfer = RingReduction(
                self.wire, self.hops[0], rows, out, group, op, scale_of(op, len(rows)), cut
            )
        else:
            transfer = self._make_reduction(rows, out, group, scale_of(op, len(rows)), sync, is_flush)
        return self.execution.submit(transfer, async_op=async_op)

    def _make_reduction(
        self,
        rows: Tensor,
        out: Tensor,
        group: ProcessGroup,
        factor: float,
        sync: GradientSync,
        is_flush: bool,
    ) -> Reduction:
        """Cut the buffer, and decide whether gradients cross nodes or stay pending.

        The training loop decides about sync and about `.grad`, on all ranks alike.
        """
        pending = self._pending_for(rows, sync)
        crosses_nodes = pending is None or sync is GradientSync.ACROSS
        if crosses_nodes and pending is not None and not is_flush:
            crosses_nodes = not self.gradients.waits_for_next_use()
        self.pending = None
        if pending is not None and not crosses_nodes:
            out.zero_()
            self.pending = pending
            self.gradients.on_deferred()
        at_once = len(self.hops) == 1 and pending is None and self.feedback is None
        chunks = [
            Chunk(
                layout,
                rows[:, layout.columns.at],
                out[:, layout.columns.at],
                None if pending is None else pending[:, layout.columns.at],
            )
            for layout in self._layouts.of(rows.dtype, self._pieces_of(rows.shape[1]), at_once)
        ]
        number, self.calls = self.calls, self.calls + 1
        return Reduction(
            *(self.wire, self.config, chunks, group),
            factor=factor,
            crosses_nodes=crosses_nodes,
            number=number,
            feedback=self.feedback,
            device=rows.device,
        )

    def _pieces_of(self, numel: int) -> tuple[Piece, ...]:
        """The pieces of a row of `numel` elements."""
        pieces = self.pieces() or (Piece(numel),)
        known = sum(piece.numel for piece in pieces)
        if known != numel:
            raise RuntimeError(
                f"FSDP2 reduces {numel} elements per rank of unit '{self.wire.unit}', but its parameters "
                f"with gradients have {known}; zeropp cannot encode an unknown layout. Use "
                "Config(gradients_in_node='none', gradients_across='none', rotate=False) for this unit"
            )
        return pieces

    def _pending_for(self, rows: Tensor, sync: GradientSync) -> Tensor | None:
        """The node slice [N, S] that this micro-batch is added to; None if nothing is deferred."""
        pending = self.pending
        if pending is not None:
            self.gradients.raise_if_gone()
        if not self.can_defer or (pending is None and sync is GradientSync.ACROSS):
            return None
        shape = (self.hops[-1].size, rows.shape[1])
        if pending is None:
            return torch.zeros(shape, dtype=self._pending_dtype, device=rows.device)
        if pending.shape != shape:
            raise RuntimeError(
                f"unit '{self.wire.unit}' reduces {shape[1]} elements per rank in this micro-batch and "
                f"{pending.shape[1]} in those before it; requires_grad of its parameters must not change "
                "while gradients accumulate without cross-node sync"
            )
        return pending
