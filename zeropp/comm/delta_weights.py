"""Differences of weights (weights="delta-int4"): hop A sends the change since its last send, in four bits.

The node shard is then the *reference*: the weights in 16 bits that all nodes agree on, [N, S] on each rank.

    difference [1, S] = shard - own row of the reference         fp32
      hop A:  int4 of the difference, to all ranks of the rail [N, E]
    reference = 16 bits of (reference + decoded differences)     the same on all ranks of the rail

The sender adds the decoded difference to its reference, as the receivers do. So the next difference contains
the rounding error of this one, and errors do not build up: the reference is always within one rounding of the
weights.

[Note: Full sends]
Hop A sends the weights themselves, in 16 bits, in the first gather, after a state-dict load or
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
    """Update the encoded `reference` [N, E16] to the shards [S] of all members.

    Args:
        key: names scratch buffers. Chunks and gathers that run at the same time have different keys.
    """
    codec, kept = chunk.difference, chunk.kept
    assert codec is not None
    me, members, numel = wire.member(hop), hop.size, shard.numel()
    take, device = wire.scratch.take, shard.device
    encoded = take(f"differences.encoded.{key}", members, codec.row_bytes, device=device)
    with wire.label("all_gather", "encode"):
        # No key in the name: the buffer is used up before the next yield, so chunks can share it.
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
        kept.encode(updated.clamp_(-largest, largest), reference)  # clamps inf; NaN stays NaN
