"""Pipelining: while one chunk of a buffer is on the wire, the next one is encoded.

[Note: Chunks]
A buffer of rows [W, S] is cut into chunks of columns, each of whole blocks, so that cutting changes no code
and no scale. Each chunk goes through its hops as a generator that yields while its data is on the wire:

    chunk 0   encode  ~hop 1~  recode  ~~hop 2~~  decode
    chunk 1           encode  ~hop 1~  recode  ~~hop 2~~  decode

All ranks cut alike and advance the chunks in the same order, so they start the collectives of every group in
the same order.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable

# Each chunk costs messages and Python, and keeps more of the hops apart. Two hide most of what can be hidden:
# four took longer on every link that was measured, one about as long.
MAX_CHUNKS = 2
MIN_CHUNK_ELEMENTS = 1 << 16  # of a row; below that, latency and Python cost more than overlap gains


def column_chunks(numel: int, block_size: int) -> list[slice]:
    """Slices of a row of `numel` elements, of whole blocks but for the last.

    >>> column_chunks(100, 128)
    [slice(0, 100, None)]
    >>> column_chunks(200_001, 128)
    [slice(0, 100096, None), slice(100096, 200001, None)]
    """
    count = max(1, min(MAX_CHUNKS, numel // MIN_CHUNK_ELEMENTS))
    width = -(-numel // count // block_size) * block_size
    return [slice(start, min(start + width, numel)) for start in range(0, numel, width)]


def run_pipelined(chunks: Iterable[Generator[None]]) -> None:
    """Run all to their end. Newer ones advance first: they put data on the wire before an older one waits."""
    active: list[Generator[None]] = []

    def advance() -> None:
        for chunk in reversed(active[:]):
            try:
                next(chunk)
            except StopIteration:
                active.remove(chunk)

    for chunk in chunks:
        active.append(chunk)
        advance()
    while active:
        advance()
