"""How a row of a buffer is cut: into chunks for the pipeline, and into blocks that respect parameters.

[Note: Chunks]
A buffer of rows [W, S] is cut into chunks of columns, each of whole blocks, so that cutting changes no code
and no scale. All ranks cut alike: they have the same Config, the same backend and the same lengths of
parameters.

What a chunk gains is that a unit's hops overlap with each other and with its codecs. What it costs are
messages, and the Python that starts them. On gloo the cores that compute pay for that, and what overlaps with
a unit's hops is the next unit anyway (lanes.py). So with chunks="auto" two hops on gloo have far longer ones:
benchmarks/chunks.py compares.

[Note: Blocks of a parameter]
A shard is its parameters' shards, one after the other, and a block has one scale. A block with the end of a
norm (weights near 1) and the start of a matrix (near 0.02) would lose the latter. So a long parameter has
blocks of its own: a new block starts with it and after it. Short ones share theirs; a block for each would
cost more bytes than it is worth (a norm's shard can be three elements). What is packed from several stretches
of columns (column_groups.py) has blocks of its own for each: no block is in two places.

    shard   norm | matrix                       | bias, norm | matrix
    blocks  [ n ][  m  ][  m  ][  m  ][  m  ][ m][   b n    ][  m  ][  m  ] ...
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

AUTO_CHUNKS = 2
MIN_CHUNK_ELEMENTS = 1 << 16  # of a row; below that, latency and Python cost more than overlap gains
MIN_CHUNK_ELEMENTS_ON_GLOO = 1 << 20
# Blocks that a parameter must fill to get its own. Each end costs half a block on average: below 1%.
LONG_PARAMETER_BLOCKS = 64


@dataclass(frozen=True)
class Columns:
    """A chunk of the columns of a buffer."""

    at: slice
    block_starts: tuple[int, ...] = ()
    """Where in the chunk a new block starts although the one before is not full."""


class Cut(NamedTuple):
    """How a row may be cut."""

    most: int
    """Chunks."""
    least: int = MIN_CHUNK_ELEMENTS
    """Elements of each."""

    @classmethod
    def of(cls, chunks: int | Literal["auto"], on_gloo: bool = False) -> Cut:
        """What `Config.chunks` means; on_gloo: for two hops there. See [Note: Chunks]."""
        if chunks != "auto":
            return cls(chunks, MIN_CHUNK_ELEMENTS)
        return cls(AUTO_CHUNKS, MIN_CHUNK_ELEMENTS_ON_GLOO if on_gloo else MIN_CHUNK_ELEMENTS)


def column_chunks(
    cut: Cut,
    numel: int,
    block_size: int,
    parameters: tuple[int, ...] = (),
    edges: tuple[int, ...] = (),
) -> list[Columns]:
    """Chunks of a row of `numel` elements, of whole blocks, given the elements of each parameter in it, and
    where a new stretch begins.

    If those are not `numel` together, as in a reduction of only some of them, no block is aligned.

    >>> column_chunks(Cut(most=2), 100, 128)
    [Columns(at=slice(0, 100, None), block_starts=())]
    >>> first, second = column_chunks(Cut(most=2), 200_001, 128, (65, 199_936))
    >>> first
    Columns(at=slice(0, 100033, None), block_starts=(65,))
    >>> second
    Columns(at=slice(100033, 200001, None), block_starts=())
    """
    starts = block_starts(parameters, block_size, edges) if sum(parameters) == numel else edges
    count = max(1, min(cut.most, numel // cut.least))
    cuts = [0]
    for number in range(1, count):
        wanted = numel * number // count
        before = max((start for start in starts if start <= wanted), default=0)
        after = min((start for start in starts if start > wanted), default=numel)
        cuts.append(min(before + -(-(wanted - before) // block_size) * block_size, after))
    return [
        Columns(slice(first, last), tuple(start - first for start in starts if first < start < last))
        for first, last in pairwise((*cuts, numel))
        if first < last
    ]


@lru_cache(maxsize=4096)
def block_starts(
    parameters: tuple[int, ...], block_size: int, edges: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Where a block must end early; see [Note: Blocks of a parameter].

    >>> block_starts((100, 100, 1_000_000, 100), block_size=128)
    (200, 1000200)
    >>> block_starts((128, 1_000_000), block_size=128)  # at the end of a block anyway
    ()
    >>> block_starts((128, 128, 100), block_size=128, edges=(128,))
    (128,)
    """
    starts, position, after_long = [0], 0, False
    for length in parameters:
        is_long = length >= LONG_PARAMETER_BLOCKS * block_size
        ends_early = (is_long or after_long) and (position - starts[-1]) % block_size
        if ends_early or (position in edges and position > starts[-1]):
            starts.append(position)
        position, after_long = position + length, is_long
    return tuple(starts[1:])
