"""Weights as differences ("delta-int4"): hop A sends what changed since the last time, in four bits.

The node shard is then the *reference*: the weights in 16 bits as all nodes hold them, [N, S] on each rank.

    difference [1, S] = shard - own row of the reference         fp32
      hop A:  int4 of the difference, to all ranks of the rail [N, E]
    reference = 16 bits of (reference + decoded differences)     the same on all ranks of the rail

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

from ..topology import Hop
from .layout import GatherChunk
from .wire import Wire


def send_difference(
    wire: Wire,
    hop: Hop,
    group: ProcessGroup,
    chunk: GatherChunk,
    shard: Tensor,
    reference: Tensor,
    key: str,
) -> Generator[None]:
    """Bring `reference` [N, E16], encoded as it is kept, up to date with the shards [S] of all members.
    `key` is that of a buffer that nobody else uses meanwhile."""
    codec, kept = chunk.difference, chunk.kept
    assert codec is not None
    me, members, numel = wire.member(hop), hop.size, shard.numel()
    take, device = wire.scratch.take, shard.device
    encoded = take(f"differences.encoded.{key}", members, codec.row_bytes, device=device)
    with wire.label("all_gather", "encode"):
        difference = take("differences.difference", 1, numel, dtype=torch.float32, device=device)
        kept.decode(reference[me : me + 1], difference)
        torch.sub(shard.view(1, -1), difference, out=difference)
        codec.encode(difference, encoded[me : me + 1])
    yield from wire.all_gather(hop, group, encoded, chunk.number)
    with wire.label("all_gather", "decode"):
        updated = take("differences.updated", members, numel, dtype=torch.float32, device=device)
        kept.decode(reference, updated)
        codec.decode_sum(encoded.unsqueeze(0), updated, accumulate=True)
        largest = torch.finfo(shard.dtype).max
        kept.encode(updated.clamp_(-largest, largest), reference)  # NaN stays NaN
