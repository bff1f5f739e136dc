"""How a row of a buffer is cut: into segments that respect parameters, and into chunks for the pipeline.

[Note: Segments]
A row is the shards of a unit's parameters, one after the other. What a parameter receives depends on its own
values only. So a parameter that several shard groups hold (a norm that tensor parallelism replicates, a
router, the embedding of two pipeline stages) stays equal in all of them. Two rules follow:

- A block holds elements of one parameter. A scale that two parameters shared would round the smaller one to
  zero, and differently in every group.
- A rotated group holds elements of one row of a parameter (a slice of its dimension 0). So a row of gradients
  that is zero on all ranks (a token that no batch has, an expert without tokens) arrives as zero. Parameters
  whose rows are no multiple of 64 elements, all those of one dimension among them, are not rotated.

The end of a parameter pads its last block. Short shards take the size of blocks that needs the fewest bytes.
The shortest are sent as they are. Neighbours of one format are one segment if blocks end where they meet:
the bytes are the same, and fewer kernels run.

    row       matrix, rows of 4096     | norm: 64        | bias: 12  | matrix, rows of 100
    segments  [ 128 ][ 128 ] ... [ 128 ] [      64     ] [  as is  ] [ 128 ][ 128 ] ... [ 36, padded ]
              rotated                    not rotated                 not rotated

[Note: Chunks]
A buffer of rows [W, S] is cut into chunks of columns, each of whole blocks, so that cutting changes no code
and no scale. All ranks cut alike: they have the same Config, the same backend and the same shards.

A chunk lets a unit's hops overlap with each other and with its codecs. It costs messages, and the Python that
starts them. On gloo the cores that compute pay for that, and the next unit overlaps with a unit's hops anyway
(cpu/comm_threads.py). So with chunks="auto" two hops on gloo have far longer chunks: benchmarks/chunks.py
compares.
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
MIN_CHUNK_ELEMENTS = 1 << 16  # of a row; below that, latency and Python cost more than overlap gains
MIN_CHUNK_ELEMENTS_ON_GLOO = 1 << 20
BLOCK_SIZES = tuple(1 << n for n in range(MIN_BLOCK_SIZE.bit_length() - 1, MAX_BLOCK_SIZE.bit_length()))
AS_IS_ELEMENTS = 16
"""Shards of so many elements or fewer are sent as they are: a padded block would take about as many bytes."""


class Piece(NamedTuple):
    """A parameter's part of a row."""

    numel: int
    row: int = 1
    """Elements of a row of the parameter. [Note: Segments]"""


@dataclass(frozen=True)
class Columns:
    """A chunk of the columns of a buffer."""

    at: slice
    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        return int(self.at.stop - self.at.start)


class ChunkPolicy(NamedTuple):
    """How a row may be cut."""

    most: int
    """Chunks."""
    least: int = MIN_CHUNK_ELEMENTS
    """Elements of each."""

    @classmethod
    def of(cls, chunks: int | Literal["auto"], on_gloo: bool = False) -> ChunkPolicy:
        """What `Config.chunks` means; on_gloo: for two hops there. See [Note: Chunks]."""
        if chunks != "auto":
            return cls(chunks, MIN_CHUNK_ELEMENTS)
        return cls(AUTO_CHUNKS, MIN_CHUNK_ELEMENTS_ON_GLOO if on_gloo else MIN_CHUNK_ELEMENTS)


def row_segments(
    pieces: Sequence[Piece], block_size: int, *, edges: Collection[int] = (), merge: bool = True
) -> tuple[Segment, ...]:
    """The segments of a row. No segment crosses one of `edges`, and with merge=False none holds two pieces.

    See [Note: Segments].

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
    """Chunks of a row of these segments, of whole blocks.

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
        nonlocal first, inside
        if inside:
            chunks.append(Columns(slice(first, position), tuple(inside)))
        first, inside = position, []

    for segment in segments:
        rest = segment
        while wanted and wanted[0] < position + rest.numel:
            block = rest.block_size or rest.numel
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
    # The same size for all hops, so that sums are encoded in the blocks that they arrived in.
    fewest = min(reversed(sizes), key=lambda size: BlockFormat(4, size).row_bytes(piece.numel))
    return Segment(piece.numel, fewest, is_rotated)


def _can_merge(first: Segment, second: Segment) -> bool:
    if (first.block_size, first.is_rotated) != (second.block_size, second.is_rotated):
        return False
    return first.block_size is None or first.numel % first.block_size == 0
