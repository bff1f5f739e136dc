"""Pipelining: while one chunk of a buffer is on the wire, the next one is encoded.

Each chunk ([Note: Chunks] in chunks.py) goes through its hops as a generator that yields while its data is on
the wire. All are started, and then go on in turns:

    chunk 0   encode          ~hop 1~  recode          ~~hop 2~~  decode
    chunk 1           encode  ~~~hop 1~~~      recode  ~~~~~hop 2~~~~~    decode

All ranks cut alike and advance the chunks in the same order, so they start the collectives of every group in
the same order.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable


def pipelined(chunks: Iterable[Generator[None]]) -> Generator[None]:
    """Run all to their end. Yields whenever there is nothing left to do but to wait for the wire: others may
    put something on it then (cpu/comm_threads.py)."""
    active = [chunk for chunk in chunks if _goes_on(chunk)]
    while active:
        for chunk in active[:]:
            yield
            if not _goes_on(chunk):
                active.remove(chunk)


def finish(work: Generator[None]) -> None:
    """Run it to its end, waiting where it has to."""
    for _ in work:
        pass


def _goes_on(chunk: Generator[None]) -> bool:
    """Advance it; whether it has more to do."""
    try:
        next(chunk)
    except StopIteration:
        return False
    return True
