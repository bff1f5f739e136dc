"""Weights as differences ("delta-int4"): hop A sends what changed since the last time, in four bits.

The node shard is then the *reference*: the weights in 16 bits as all nodes hold them, [N, S] on each rank.

    difference [1, S] = shard - own row of the reference         fp32
      hop A:  int4 of the difference, to all ranks of the column [N, E]
    reference = 16 bits of (reference + decoded differences)     the same on all ranks of the column

The sender adds what it sent, not what it meant to send. So the next difference contains what this one has
rounded off, and errors do not build up: the reference is always within one rounding of the weights.

[Note: Full sends]
The weights themselves are sent, in 16 bits, when there is no reference: at first, after a state-dict load or
`invalidate()`, and after `refresh_every` differences. All of these happen on all ranks alike. A block of
weights that is not finite makes the block of the reference NaN until the next full send.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from ..labels import Label
from ..quant import BlockCodec, BlockFormat, Codec
from ..topology import Hop
from .wire import Wire


class Differences:
    """Keeps the reference of one unit up to date."""

    def __init__(self, wire: Wire, hop: Hop, block_size: int, refresh_every: int) -> None:
        self.wire, self.hop, self.refresh_every = wire, hop, refresh_every
        self.has_reference = False
        self.sent = 0
        """Differences since the last full send."""
        self._codec = BlockCodec(BlockFormat(4, block_size))

    @property
    def are_next(self) -> bool:
        """Whether the next send is a difference; see [Note: Full sends]."""
        return self.has_reference and not (self.refresh_every and self.sent >= self.refresh_every)

    def count_send(self) -> None:
        self.sent = self.sent + 1 if self.are_next else 0
        self.has_reference = True

    def send(
        self,
        chunk: int,
        shard: Tensor,
        reference: Tensor,
        codec: Codec,
        group: ProcessGroup,
        block_starts: tuple[int, ...] = (),
    ) -> Generator[None]:
        """Bring `reference` [N, E16], encoded by `codec`, up to date with the shards [S] of all members."""
        wire_codec = self._codec.with_block_starts(block_starts)
        me, unit = (self.hop.group or group).rank(), self.wire.unit
        numel, members = shard.numel(), self.hop.size
        encoded = self._scratch(f"encoded.{chunk}", members, wire_codec.row_bytes(numel), torch.uint8, shard)
        with record_function(str(Label("all_gather", "encode", unit))):
            difference = self._scratch("difference", 1, numel, torch.float32, shard)
            codec.decode(reference[me : me + 1], difference)
            torch.sub(shard.view(1, -1), difference, out=difference)
            wire_codec.encode(difference, encoded[me : me + 1])
        yield from self.wire.all_gather(self.hop, group, encoded)
        with record_function(str(Label("all_gather", "decode", unit))):
            updated = self._scratch("updated", members, numel, torch.float32, shard)
            codec.decode(reference, updated)
            wire_codec.decode_sum(encoded.unsqueeze(0), updated, accumulate=True)
            largest = torch.finfo(shard.dtype).max
            codec.encode(updated.clamp_(-largest, largest), reference)  # NaN stays NaN

    def _scratch(self, tag: str, rows: int, columns: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        return self.wire.scratch.take(f"differences.{tag}", rows, columns, dtype=dtype, device=like.device)
