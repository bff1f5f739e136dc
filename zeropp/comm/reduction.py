"""One reduction of gradients: what runs between FSDP2's call and the reduced shard.

    full gradients [W, S] --encode, rows by rail--> [n, N, E1]
      hop 1, in-node:  all-to-all over the n ranks of the node ---> [n senders, N, E1]
    decode, sum over senders in fp32 --> node slice [N, S] --encode--> [N, E2]
      hop 2, across:   all-to-all over the N ranks of the rail -> [N senders, 1, E2]
    decode, sum over senders in fp32 --> shard [1, S]

Each value is encoded at most twice, for any number of ranks, and every sum is in fp32. On one node, with one
rank per node, or on the flat route, there is one hop.

[Note: Rotated space]
If both hops rotate, the node slice stays rotated: the sum of rotated rows is the rotated sum. So a value is
rotated once, before hop 1, and rotated back once, after the last sum. Pending gradients and stored errors are
rotated, too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ..config import Config
from ..quant.random_bf16 import round_at_random
from ..topology import HopName
from .error_feedback import Feedback
from .execution import Transfer, pipelined
from .layout import HopCodec, HopPlan, ReduceChunk
from .wire import Wire


@dataclass
class Chunk:
    """Some columns of a reduction; see [Note: Chunks] in chunks.py."""

    layout: ReduceChunk
    rows: Tensor | None
    """Full gradients [W, S]. None once they are encoded: FSDP2's buffer may be freed then."""
    out: Tensor
    """The reduced shard [1, S]."""
    pending: Tensor | None
    """The node slice [N, S] to add to; see [Note: Accumulation] in reduce_scatter.py."""


class Reduction(Transfer):
    """Reduces rows [W, S] of all ranks to this rank's shard [1, S]."""

    reads_input_first = True

    def __init__(
        self,
        wire: Wire,
        config: Config,
        chunks: Iterable[Chunk],
        group: ProcessGroup,
        *,
        factor: float,
        crosses_nodes: bool,
        number: int,
        feedback: Feedback | None,
        device: torch.device,
    ) -> None:
        """Describe a reduction.

        Args:
            factor: what the sum over all ranks is multiplied by.
            crosses_nodes: False ends at the node slice.
            number: of this reduction; stochastic rounding draws other noise for each number.
        """
        self.unit, self.device = wire.unit, device
        self._wire, self._config, self._group = wire, config, group
        self._chunks = list(chunks)
        self._factor, self._crosses_nodes, self._number = factor, crosses_nodes, number
        self._feedback = feedback
        self._slot = 0

    def prepare(self, slot: int) -> None:
        self._slot = slot

    def steps(self) -> Generator[None]:
        yield from pipelined(self._reduce(chunk) for chunk in self._chunks)

    def _reduce(self, chunk: Chunk) -> Generator[None]:
        """Take the way with the fewest passes over the chunk."""
        hops = chunk.layout.legs
        if chunk.pending is not None or self._feedback is not None:
            return self._reduce_by_sums(chunk)
        if len(hops) == 1:
            return self._reduce_at_once(chunk)
        can_recode = all(hop.is_integer for hop in hops)
        return self._reduce_by_recoding(chunk) if can_recode else self._reduce_by_sums(chunk)

    def _reduce_at_once(self, chunk: Chunk) -> Generator[None]:
        """The only hop: rows -> out."""
        (hop,) = chunk.layout.legs
        received = yield from self._send_rows(chunk, hop)
        self._decode_sum(hop.on_wire, received, chunk.out, self._factor)

    def _reduce_by_recoding(self, chunk: Chunk) -> Generator[None]:
        """rows -> node slice -> out. One pass decodes, sums and encodes the node slice."""
        first, last = chunk.layout.legs
        arrived = yield from self._send_rows(chunk, first)
        seed = self._noise_seed(last.hop.name)

        def recode(sent: Tensor) -> None:
            first.in_sums.recode(arrived, last.in_sums, sent, self._factor, seed)

        received = yield from self._exchange(chunk, last, recode, "recode")
        self._decode_sum(last.on_wire, received, chunk.out, 1.0)

    def _reduce_by_sums(self, chunk: Chunk) -> Generator[None]:
        """rows -> node slice [N, S] in fp32 -> out; no further than the node slice unless it crosses
        nodes."""
        *before, last = chunk.layout.legs
        pending, sums = chunk.pending, chunk.pending
        if sums is None or sums.dtype != torch.float32:
            shape = (last.hop.size, chunk.out.shape[1])
            sums = self._take("sums", chunk, shape, torch.float32)
            sums.zero_() if pending is None else sums.copy_(pending)
        for hop in before:
            arrived = yield from self._send_rows(chunk, hop)
            self._decode_sum(hop.in_sums, arrived, sums, self._factor, accumulate=True)
        if chunk.rows is not None:  # one rank per node: its own gradients are the node slice
            sums.add_(chunk.rows, alpha=self._factor)
            chunk.rows = None
        if not self._crosses_nodes:
            if pending is not None and pending is not sums:
                self._round_pending(chunk, sums, pending)
            return

        def encode(sent: Tensor) -> None:
            self._encode_sums(chunk, last, sums, sent)

        received = yield from self._exchange(chunk, last, encode, "recode")
        self._decode_sum(last.on_wire, received, chunk.out, 1.0)

    def _encode_sums(self, chunk: Chunk, hop: HopPlan, sums: Tensor, sent: Tensor) -> None:
        """Encode the node slice, with error feedback if the Config has it. Overwrites sums."""
        number, errors, feedback = chunk.layout.number, chunk.layout.errors, self._feedback
        seed = self._noise_seed(hop.hop.name)
        if feedback is None or errors is None:
            hop.in_sums.encode(sums, sent, seed=seed)
            return
        feedback.add_to(number, sums, errors)
        hop.in_sums.encode(sums, sent, seed=seed)
        feedback.keep(number, sums, sent, errors)

    def _round_pending(self, chunk: Chunk, sums: Tensor, pending: Tensor) -> None:
        """pending = sums in bf16. The noise of an element follows from its position in its parameter."""
        seed, start = self._noise_seed("pending"), 0
        for segment in chunk.layout.columns.segments:
            at = slice(start, start + segment.numel)
            round_at_random(sums[:, at], pending[:, at], seed, segment.offset)
            start = at.stop

    def _send_rows(self, chunk: Chunk, hop: HopPlan) -> Generator[None, None, Tensor]:
        """The first hop: what arrives is [n, N, E1] if it is the first of two."""

        def encode(sent: Tensor) -> None:
            assert chunk.rows is not None
            order = self._wire.topology.row_order if len(chunk.layout.legs) == 2 else None
            hop.on_wire.encode(chunk.rows, sent, order=order, seed=self._noise_seed(hop.hop.name))
            chunk.rows = None

        return self._exchange(chunk, hop, encode, "encode")

    def _exchange(
        self, chunk: Chunk, hop: HopPlan, fill: Callable[[Tensor], None], what: str
    ) -> Generator[None, None, Tensor]:
        """Let `fill` encode all rows [m * R, E], and swap them over the m ranks of the hop: received [m, R,
        E]."""
        sent, received = (self._take(f"{hop.hop.name}.{way}", chunk, hop.shape) for way in ("sent", "got"))
        with self._wire.label("reduce_scatter", what):
            fill(sent.view(-1, hop.shape[-1]))
        yield from self._wire.all_to_all(hop.hop, self._group, sent, received, chunk.layout.number)
        return received

    def _take(
        self, name: str, chunk: Chunk, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8
    ) -> Tensor:
        """A scratch buffer that no other chunk and no other transfer uses at the same time."""
        tag = f"reduce_scatter.{name}.{self._slot}.{chunk.layout.number}"
        return self._wire.scratch.take(tag, *shape, dtype=dtype, device=self.device)

    def _decode_sum(
        self, codec: HopCodec, received: Tensor, out: Tensor, factor: float, accumulate: bool = False
    ) -> None:
        with self._wire.label("reduce_scatter", "decode"):
            codec.decode_sum(received, out, factor, accumulate)

    def _noise_seed(self, where: HopName | Literal["pending"]) -> int:
        """Seed of stochastic rounding: another one in each reduction."""
        return noise_key(self._config.seed, where, self._wire.topology.rank) | self._number & 0xFFFFFFFF


def scale_of(op: ReduceOp | ReduceOp.RedOpType, world_size: int) -> float:
    """Return the factor of the sum over all ranks.

    >>> scale_of(ReduceOp.AVG, 4), scale_of(ReduceOp.SUM, 4), scale_of(ReduceOp.PREMUL_SUM(0.5), 4)
    (0.25, 1.0, 0.5)
    """
    kind = getattr(op, "op", op)  # ReduceOp.AVG is a RedOpType, PREMUL_SUM(f) a ReduceOp with a factor
    if kind == ReduceOp.AVG:
        return 1.0 / world_size
    if kind == ReduceOp.SUM:
        return 1.0
    if isinstance(op, ReduceOp) and kind == ReduceOp.PREMUL_SUM:
        return float(op.factor)
    raise ValueError(f"cannot reduce gradients with {op}; FSDP2 uses AVG, SUM or PREMUL_SUM")


@cache
def noise_key(seed: int, where: str, position: int) -> int:
    """Upper half of the seeds of stochastic rounding on a hop, for the rank at `position` of the shard group.

    Nothing else that differs between shard groups is part of it: equal gradients of a parameter are rounded
    alike in all shard groups. See [Note: Segments] in chunks.py.
    """
    return crc32(f"{seed}/{where}/{position}".encode()) << 32
