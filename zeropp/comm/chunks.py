"""Segments and chunks: a row of a buffer is cut into segments that respect parameters, and into chunks for
the pipeline.

[Note: Segments]
A row is the shards of a unit's parameters, one after the other. The bytes of a parameter depend on its own
values only. So a parameter that several shard groups hold (a norm that tensor parallelism replicates, a
router, the embedding of two pipeline stages) stays equal in all of them. Two rules follow:

- A block holds elements of one parameter. A scale shared by two parameters would round the smaller one to
  zero, and differently in every shard group.
- A rotated group holds elements of one row of a parameter (a slice of its dimension 0). So a row of gradients
  that is zero on all ranks (a token in no batch, an expert without tokens) arrives as zero. Parameters whose
  rows are no multiple of 64 elements are not rotated; all parameters of one dimension are among them.

The last block of a parameter is padded. Short shards use the block size that needs the fewest bytes. The
shortest shards are not encoded. Adjacent parameters of one format form one segment if a block ends at their
border: the bytes are the same, and fewer kernels run.

    row       matrix, rows of 4096     | norm: 64        | bias: 12  | matrix, rows of 100
    segments  [ 128 ][ 128 ] ... [ 128 ] [      64     ] [  as is  ] [ 128 ][ 128 ] ... [ 36, padded ]
              rotated                    not rotated                 not rotated

[Note: Chunks]
A buffer of rows [W, S] is cut into chunks of columns. A chunk has whole blocks, so the cut changes no code
and no scale. All ranks cut alike: they have the same Config, the same backend and the same shards.

With chunks, a unit's hops overlap with each other and with its codecs ([Note: Pipelining] in execution.py).
Each chunk costs messages, and the Python that starts them. On gloo the cores that compute pay for both, and a
unit's hops overlap with the next unit anyway (cpu/comm_threads.py). So with chunks="auto", two hops on gloo
have far longer chunks; benchmarks/chunks.py compares them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from ..config import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE
from ..quant import BlockFormat, Segment
from ..quant.rotation import GROUP

AUTO_CHUNKS = 2
MIN_CHUNK_ELEMENTS = 1 << 16  # of a row; below it, latency and Python cost more than overlap gains
MIN_CHUNK_ELEMENTS_ON_GLOO = 1 << 20
BLOCK_SIZES = tuple(1 << n for n in range(MIN_BLOCK_SIZE.bit_length() - 1, MAX_BLOCK_SIZE.bit_length()))
AS_IS_ELEMENTS = 16
"""Shards up to this size are not encoded: a padded block would take about as many bytes."""


class Piece(NamedTuple):
    """A parameter's part of a row."""

    numel: int
    row: int = 1
    """Elements of a row of the parameter (a slice of dimension 0); see [Note: Segments]."""


@dataclass(frozen=True)
class Columns:
    """A chunk of the columns of a buffer."""

    at: slice
    """Columns of the buffer."""
    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        return int(self.at.stop - self.at.start)


class ChunkPolicy(NamedTuple):
    """Limits on the chunks of a row."""

    most: int
    """Maximum number of chunks."""
    least: int = MIN_CHUNK_ELEMENTS
    """Minimum elements of a chunk."""

    @classmethod
    def of(cls, chunks: int | Literal["auto"], on_gloo: bool = False) -> ChunkPolicy:
        """Return the policy of `Config.chunks`. on_gloo: for two hops on gloo; see [Note: Chunks]."""
        if chunks != "auto":
            return cls(chunks, MIN_CHUNK_ELEMENTS)
        return cls(AUTO_CHUNKS, MIN_CHUNK_ELEMENTS_ON_GLOO if on_gloo else MIN_CHUNK_ELEMENTS)


def row_segments(
    pieces: Sequence[Piece], block_size: int, *, edges: Collection[int] = (), merge: bool = True
) -> tuple[Segment, ...]:
    """Return the segments of a row; see [Note: Segments].

    No segment crosses one of `edges`. With merge=False, no segment holds two pieces.

    >>> for segment in row_segments([Piece(8192, row=4096), Piece(64), Piece(12), Piece(200, row=100)], 128):
    ...     print(segment)
    Segment(numel=8192, block_size=128, is_rotated=True, offset=0)
    Segment(numel=64, block_size=64, is_rotated=False, offset=0)
    Segment(numel=12, block_size=None, is_rotated=False, offset=0)
    Segment(numel=200, block_size=32, is_rotated=False, offset=0)
    """
    found: list[Segment] = []
    position = 0
    for piece in pieces:
        if piece.numel == 0:
            continue
        segment = _segment(piece, block_size)
        last = found[-1] if found else None
        if merge and last is not None and position not in edges and _can_merge(last, segment):
            found[-1] = last._replace(numel=last.numel + segment.numel)
        else:
            found.append(segment)
        position += piece.numel
    return tuple(found)


def column_chunks(cut: ChunkPolicy, segments: Sequence[Segment]) -> list[Columns]:
    """Cut a row of these segments into chunks of whole blocks.

    >>> first, second = column_chunks(ChunkPolicy(most=2), [Segment(65, 64), Segment(199_936, 128)])
    >>> first
    Columns(at=slice(0, 100033, None), segments=(Segment(numel=65, block_size=64, is_rotated=False, \
offset=0), Segment(numel=99968, block_size=128, is_rotated=False, offset=0)))
    >>> second
    Columns(at=slice(100033, 200001, None), segments=(Segment(numel=99968, block_size=128, is_rotated=False, \
offset=99968),))
    """
    numel = sum(segment.numel for segment in segments)
    count = max(1, min(cut.most, numel // cut.least))
    wanted = [numel * number // count for number in range(1, count)]
    chunks: list[Columns] = []
    inside: list[Segment] = []
    first = position = 0

    def close() -> None:
        """End the chunk at `position`."""
        nonlocal first, inside
        if inside:
            chunks.append(Columns(slice(first, position), tuple(inside)))
        first, inside = position, []

    for segment in segments:
        rest = segment
        while wanted and wanted[0] < position + rest.numel:
            block = rest.block_size or rest.numel
            # Round the cut up to the end of a block; a segment without blocks is never cut.
            taken = min(-(-(wanted.pop(0) - position) // block) * block, rest.numel)
            if taken:
                inside.append(rest._replace(numel=taken))
                position += taken
                rest = rest._replace(numel=rest.numel - taken, offset=rest.offset + taken)
            close()
        if rest.numel:
            inside.append(rest)
            position += rest.numel
    close()
    return chunks


@lru_cache(maxsize=4096)
def _segment(piece: Piece, block_size: int) -> Segment:
    if piece.numel <= AS_IS_ELEMENTS:
        return Segment(piece.numel, None)
    is_rotated = piece.row % GROUP == 0 and block_size >= GROUP
    smallest = GROUP if is_rotated else MIN_BLOCK_SIZE
    sizes = [size for size in BLOCK_SIZES if smallest <= size <= block_size]
    # 4 bits for all codecs: all hops need one block size, so that sums are encoded in the blocks in which
    # they arrived. Of sizes with equal bytes, `reversed` makes min() return the largest.
    fewest = min(reversed(sizes), key=lambda size: BlockFormat(4, size).row_bytes(piece.numel))
    return Segment(piece.numel, fewest, is_rotated)


def _can_merge(first: Segment, second: Segment) -> bool:
    if (first.block_size, first.is_rotated) != (second.block_size, second.is_rotated):
        return False
    # Otherwise a block would hold the end of `first` and the start of `second`.
    return first.block_size is None or first.numel % first.block_size == 0
