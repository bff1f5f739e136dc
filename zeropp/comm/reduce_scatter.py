"""The gradients' collective: the mirror image of the weights' one.

    full gradients [W, S] --encode, rows by rail--> [n, N, E1]
      hop 1, in-node:  all-to-all over the n ranks of the node ---> [n senders, N, E1]
    decode, sum over senders in fp32 --> node slice [N, S] --encode--> [N, E2]
      hop 2, across:   all-to-all over the N ranks of the rail -> [N senders, 1, E2]
    decode, sum over senders in fp32 --> shard [1, S]

Each value is encoded twice at most, whatever the number of ranks, and every sum is in fp32. On one node, or
with one rank a node, or on the flat route, there is one hop.

[Note: Accumulation]
With cross-node sync off, hop 2 is left out: the node slice adds up (`pending`), and FSDP2 gets zeros to add
to the sharded gradient. The next reduction with sync on sends the sum; of a unit that the forward has used
several times, the last one of the backward. `pending` is a part of `.grad` that
has not arrived yet: [Note: Dropped or taken] in fsdp2/zero_grad.py. All micro-batches must have one buffer
layout; the adapter sees to it that parameters without a gradient are sent as zeros.

[Note: Rotated space]
If both hops rotate, the node slice stays rotated: the sum of rotated rows is the rotated sum. So a value is
rotated once, before hop 1, and turned back once, after the last sum; `pending` and kept errors are rotated,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ..config import INTEGERS, CodecName, Config
from ..cpu.comm_threads import Job, lane
from ..quant import QUANTIZABLE_DTYPES
from ..quant.random_bf16 import round_at_random
from ..topology import Hop, HopName
from .bf16_ring import reduce_scatter_bf16
from .chunks import ChunkPolicy, Piece
from .cuda_graphs import refuse_capture
from .error_feedback import Feedback
from .layout import HopCodec, HopPlan, ReduceLayouts, meaning_of, reduce_chunks, why_not_the_same
from .pipeline import finish, pipelined
from .reduction import Chunk, Gradients, Overlapping, is_last_operation, noise_key, scale_of
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
"""Fields of Config that decide on the meaning of kept errors."""


class ReduceScatter:
    """Takes the place of FSDP2's reduce-scatter in one unit."""

    def __init__(
        self,
        wire: Wire,
        hops: tuple[Hop, ...],
        config: Config,
        gradients: Gradients | None = None,
        pieces: Callable[[], tuple[Piece, ...]] = tuple,
        overlap: Overlapping | None = None,
        waits: Callable[[], bool] = lambda: False,
    ) -> None:
        self.wire = wire
        self._overlap = overlap
        """None: a reduction is complete on return."""
        self.pieces = pieces
        """The parameters of a shard, in its order; empty if they are not known. Called in every reduction:
        the order is known only when training has started, and not all parameters have gradients."""
        self._waits = waits
        """With sync on: whether pending gradients wait for another reduction of the same backward."""
        self.hops = hops
        """(in-node, across), or the only one."""
        self.codec_names: dict[HopName, CodecName] = {
            "in-node": config.gradients_in_node,
            "across": config.gradients_across,
            "flat": config.gradients_across,  # Config makes sure that both are the same
        }
        self.config = config
        self.feedback = Feedback(wire.unit) if config.error_feedback and self.can_defer else None
        self.calls = 0
        """Reductions so far; numbers the noise of stochastic rounding."""
        self.sync_across, self._counts_baseline, self._flushing = True, True, False
        self.pending: Tensor | None = None
        """See [Note: Accumulation]. [N, S], as Config.gradients_pending says."""
        self._pending_dtype = torch.float32 if config.gradients_pending == "fp32" else torch.bfloat16
        self._gradients = gradients
        self._row_order = wire.topology.row_order if len(hops) == 2 else None
        self._recodes = len(hops) == 2 and all(self.codec_names[hop.name] in INTEGERS for hop in hops)
        self._layouts = ReduceLayouts(partial(reduce_chunks, wire, hops, config, self.codec_names))

    @property
    def can_defer(self) -> bool:
        """Whether cross-node sync can be put off: there is an across hop, and it comes last."""
        return self.hops[-1].name == "across"

    @contextmanager
    def flushing(self) -> Iterator[None]:
        """Inside, a reduction of zeros sends what is pending, and is no call of the training loop's."""
        before, self.sync_across, self._flushing = self.sync_across, True, True
        try:
            yield
        finally:
            self.sync_across, self._flushing = before, False

    def pending_bytes(self, numel: int) -> int:
        """What is pending of rows of `numel` elements, while gradients accumulate without cross-node sync."""
        return self.hops[-1].size * numel * self._pending_dtype.itemsize if self.can_defer else 0

    def error_bytes(self, numel: int) -> int:
        """What kept errors take, after the first reduction of rows of `numel` elements."""
        if self.feedback is None:
            return 0
        chunks = self._layouts.of(torch.float32, self._pieces_of(numel), False)
        kept = [chunk.errors.kept.row_bytes for chunk in chunks if chunk.errors is not None]
        return self.hops[-1].size * sum(kept)

    def take_over(self, other: ReduceScatter) -> None:
        """Go on counting where `other` is, and with the errors it keeps, if they mean the same here."""
        self.calls = other.calls
        same = meaning_of(self.config, FEEDBACK_FIELDS) == meaning_of(other.config, FEEDBACK_FIELDS)
        if same and self.feedback is not None:
            self.feedback = other.feedback

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on as if it had not stopped."""
        state: dict[str, Any] = {"calls": self.calls, "feedback": {}}
        if self.feedback is not None:
            meaning = meaning_of(self.config, FEEDBACK_FIELDS)
            state |= {"feedback": self.feedback.copies(), "meaning": meaning}
        return state

    def why_not_load(self, state: Mapping[str, Any]) -> str | None:
        """Why `state` cannot be loaded, or None."""
        if self.feedback is None or not state["feedback"]:
            return None
        meaning = meaning_of(self.config, FEEDBACK_FIELDS)
        return why_not_the_same(self.wire.unit, "kept errors", state, meaning)

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Returns whether all of it is used."""
        self.calls = int(state["calls"])
        if self.feedback is not None:
            self.feedback.kept = {chunk: kept.clone() for chunk, kept in state["feedback"].items()}
        return self.feedback is not None or not state["feedback"]

    def set_sync_across(self, sync_across: bool, counts_baseline: bool = True) -> None:
        """Whether the next reductions go across nodes; see [Note: Accumulation]. counts_baseline: whether
        FSDP2 would have reduced those that do not."""
        self.sync_across, self._counts_baseline = sync_across, sync_across or counts_baseline

    def drop_pending(self) -> None:
        """Forget what has been put off."""
        self.pending = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self._counts_baseline and not self._flushing:
            self.wire.count_baseline("reduce_scatter", output_tensor.numel())
        if self._overlap is None:
            return self._start(output_tensor, input_tensor, group, op, async_op)
        place = self._overlap.late_place(output_tensor) if is_last_operation(op) else None
        if place is not None:
            work = self._start(place, input_tensor, group, op, async_op=True)
            if work is not None:
                self._overlap.expect(work, input_tensor, place, output_tensor)
        elif (work := self._start(output_tensor, input_tensor, group, op, async_op=True)) is not None:
            work.wait()
        return None

    def _start(
        self,
        output: Tensor,
        gradients: Tensor,
        group: ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool,
    ) -> dist.Work | None:
        """Decide how to reduce, and do it, or have it done: it is complete when what is returned is, or when
        there is nothing to return."""
        world_size, dtype = self.wire.topology.size, gradients.dtype
        flat_as_it_is = self.hops[0].name == "flat" and self.codec_names["flat"] == "none"
        if flat_as_it_is or dtype not in QUANTIZABLE_DTYPES:
            # The backend's own, counted as the ring that it should be: gloo sends twice that.
            self.wire.count_ring("reduce_scatter", "flat", group, output.numel() * output.itemsize)
            sent: dist.Work | None = dist.reduce_scatter_single(
                output, gradients, op=op, group=group, async_op=async_op
            )
            return sent
        if output.numel() == 0:
            return None
        refuse_capture(self.wire.unit, gradients.device)
        self.wire.alarm.raise_if_known()

        rows, out = gradients.view(world_size, -1), output.view(1, -1)
        factor = scale_of(op, world_size)
        is_ring = self.hops[0].name == "flat" and self.codec_names["flat"] == "bf16"
        job: Job
        if is_ring:
            cut, hop = ChunkPolicy.of(self.config.chunks), self.hops[0]
            job = partial(reduce_scatter_bf16, self.wire, hop, rows, out, group, op, factor, cut)
        else:
            job = partial(self._reduce_all, rows, out, group, factor)
        if self._overlap is not None:
            return lane("reduce").run(self.wire.unit, job, reads_first=not is_ring)
        finish(job(0))
        return None

    def _reduce_all(
        self, rows: Tensor, out: Tensor, group: ProcessGroup, factor: float, slot: int
    ) -> Generator[None]:
        """Cut what is to be reduced, and note what is put off, at once; the rest when somebody runs it."""
        return self._run(self._chunks(rows, out, group, factor, slot))

    def _chunks(
        self, rows: Tensor, out: Tensor, group: ProcessGroup, factor: float, slot: int
    ) -> list[Chunk]:
        """What is to be reduced, cut; and what is put off is noted as pending."""
        pending, sync_across = self._pending_for(rows), self.sync_across
        if sync_across and pending is not None and not self._flushing:
            sync_across = not self._waits()
        at_once = len(self.hops) == 1 and pending is None and self.feedback is None
        self.pending = None
        if pending is not None and not sync_across:
            out.zero_()
            self.pending = pending
            if self._gradients is not None:
                self._gradients.deferred()
        return [
            Chunk(
                layout,
                rows[:, layout.columns.at],
                out[:, layout.columns.at],
                None if pending is None else pending[:, layout.columns.at],
                factor,
                group,
                sync_across,
                slot,
            )
            for layout in self._layouts.of(rows.dtype, self._pieces_of(rows.shape[1]), at_once)
        ]

    def _pieces_of(self, numel: int) -> tuple[Piece, ...]:
        """The pieces of a row of `numel` elements."""
        pieces = self.pieces() or (Piece(numel),)
        known = sum(piece.numel for piece in pieces)
        if known != numel:
            raise RuntimeError(
                f"FSDP2 reduces {numel} elements per rank of unit '{self.wire.unit}', and its parameters "
                f"with gradients have {known}; zeropp does not know this layout, so it cannot encode it: use "
                "Config(gradients_in_node='none', gradients_across='none', rotate=False) for the unit"
            )
        return pieces

    def _run(self, chunks: list[Chunk]) -> Generator[None]:
        yield from pipelined(self._reduce(chunk) for chunk in chunks)
        self.calls += 1

    def _pending_for(self, rows: Tensor) -> Tensor | None:
        """The node slice [N, S] to add this micro-batch to, or None if there is nothing to put off.

        What becomes of `.grad`, and whether sync is on, is decided by the training loop, on all ranks alike.
        """
        pending = self.pending
        if pending is not None and self._gradients is not None:
            self._gradients.raise_if_gone()
        if not self.can_defer or (pending is None and self.sync_across):
            return None
        shape = (self.hops[-1].size, rows.shape[1])
        if pending is None:
            return torch.zeros(shape, dtype=self._pending_dtype, device=rows.device)
        if pending.shape != shape:
            raise RuntimeError(
                f"unit '{self.wire.unit}' reduces {shape[1]} elements per rank in this micro-batch and "
                f"{pending.shape[1]} in those before it; while gradients accumulate without cross-node sync, "
                "requires_grad of its parameters must not change"
            )
        return pending

    def _reduce(self, chunk: Chunk) -> Generator[None]:
        """Reduce one chunk, on the way that needs the fewest passes over it."""
        if chunk.pending is not None or self.feedback is not None:
            return self._reduce_by_sums(chunk)
        if len(self.hops) == 1:
            return self._reduce_at_once(chunk)
        return self._reduce_by_recoding(chunk) if self._recodes else self._reduce_by_sums(chunk)

    def _reduce_at_once(self, chunk: Chunk) -> Generator[None]:
        """The only hop: rows -> out."""
        (leg,) = chunk.layout.legs
        received = yield from self._send_rows(chunk, leg)
        self._decode_sum(leg.on_wire, received, chunk.out, chunk.factor)

    def _reduce_by_recoding(self, chunk: Chunk) -> Generator[None]:
        """rows -> node slice -> out, where the node slice is decoded, summed and encoded in one pass."""
        first, last = chunk.layout.legs
        arrived = yield from self._send_rows(chunk, first)

        def recode(sent: Tensor) -> None:
            seed = self._noise_seed(last.hop.name)
            first.in_sums.recode(arrived, last.in_sums, sent, chunk.factor, seed)

        received = yield from self._exchange(chunk, last, recode, "recode")
        self._decode_sum(last.on_wire, received, chunk.out, 1.0)

    def _reduce_by_sums(self, chunk: Chunk) -> Generator[None]:
        """rows -> node slice [N, S] in fp32 -> out; or no further than the node slice, while sync is off."""
        *before, last = chunk.layout.legs
        number, errors, feedback = chunk.layout.number, chunk.layout.errors, self.feedback
        pending, sums = chunk.pending, chunk.pending
        if sums is None or sums.dtype != torch.float32:
            sums = self.wire.scratch.take(
                f"reduce_scatter.sums.{chunk.key}",
                *(last.hop.size, chunk.out.shape[1]),
                dtype=torch.float32,
                device=chunk.out.device,
            )
            sums.zero_() if pending is None else sums.copy_(pending)
        for leg in before:
            arrived = yield from self._send_rows(chunk, leg)
            self._decode_sum(leg.in_sums, arrived, sums, chunk.factor, accumulate=True)
        if not before:  # one rank a node: its own gradients are the node slice
            sums.add_(chunk.take_rows(), alpha=chunk.factor)
        if not chunk.goes_across:
            if pending is not None and pending is not sums:
                self._round_at_random(chunk, sums, pending)
            return

        def encode(sent: Tensor) -> None:
            if feedback is not None and errors is not None:
                feedback.add_to(number, sums, errors)
            last.in_sums.encode(sums, sent, seed=self._noise_seed(last.hop.name))
            if feedback is not None and errors is not None:
                feedback.keep(number, sums, sent, errors)

        received = yield from self._exchange(chunk, last, encode, "recode")
        self._decode_sum(last.on_wire, received, chunk.out, 1.0)

    def _round_at_random(self, chunk: Chunk, sums: Tensor, pending: Tensor) -> None:
        """pending = sums, in bf16, each parameter with the noise of its own positions."""
        seed, start = self._noise_seed("pending"), 0
        for segment in chunk.layout.columns.segments:
            at = slice(start, start + segment.numel)
            round_at_random(sums[:, at], pending[:, at], seed, segment.offset)
            start = at.stop

    def _send_rows(self, chunk: Chunk, leg: HopPlan) -> Generator[None, None, Tensor]:
        """The first hop: what arrived, [n, N, E1] if it is the first of two."""
        seed = self._noise_seed(leg.hop.name)
        encode = partial(leg.on_wire.encode, chunk.take_rows(), order=self._row_order, seed=seed)
        return self._exchange(chunk, leg, encode)

    def _exchange(
        self, chunk: Chunk, leg: HopPlan, fill: Callable[[Tensor], None], what: str = "encode"
    ) -> Generator[None, None, Tensor]:
        """Let `fill` encode all rows [m * R, E], and swap them over the hop's m ranks: received [m, R, E]."""
        take, tag = self.wire.scratch.take, f"reduce_scatter.{leg.hop.name}.{chunk.key}"
        device = chunk.out.device
        sent, received = (take(f"{tag}.{way}", *leg.shape, device=device) for way in ("sent", "got"))
        with self.wire.label("reduce_scatter", what):
            fill(sent.view(-1, leg.shape[-1]))
        del fill  # and with it the full gradients
        yield from self.wire.all_to_all(leg.hop, chunk.group, sent, received, chunk.layout.number)
        return received

    def _decode_sum(
        self, codec: HopCodec, received: Tensor, out: Tensor, factor: float, accumulate: bool = False
    ) -> None:
        with self.wire.label("reduce_scatter", "decode"):
            codec.decode_sum(received, out, factor, accumulate)

    def _noise_seed(self, where: HopName | Literal["pending"]) -> int:
        """Seed of rounding at random: another one in each reduction."""
        return noise_key(self.config.seed, where, self.wire.topology.rank) | self.calls & 0xFFFFFFFF
