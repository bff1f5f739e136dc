"""Pipelining: while one chunk of a buffer is on the wire, the next one is encoded.

Each chunk ([Note: Chunks] in chunks.py) goes through its hops as a generator that yields while its data is on
the wire:

    chunk 0   encode  ~hop 1~  recode  ~~hop 2~~  decode
    chunk 1           encode  ~hop 1~  recode  ~~hop 2~~  decode

All ranks cut alike and advance the chunks in the same order, so they start the collectives of every group in
the same order.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable


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
