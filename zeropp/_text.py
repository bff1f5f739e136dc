"""Format numbers and lists for messages."""

from __future__ import annotations

UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(number: int, what: str) -> str:
    """Return a number and its noun, in singular or plural.

    >>> count(1, "rank"), count(4, "rank")
    ('1 rank', '4 ranks')
    """
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def parameters(number: float) -> str:
    """Return a number of parameters, shortened to three digits.

    >>> parameters(18e9), parameters(1_870_000), parameters(123)
    ('18B', '1.87M', '123')
    """
    return _short(number).replace("G", "B")  # papers write 18B parameters, but 18 GB


def size(number: float) -> str:
    """Return a number of bytes, in powers of ten.

    >>> size(0), size(54_321), size(1.2e9)
    ('0 bytes', '54.3 kB', '1.2 GB')
    """
    short = _short(number)
    return f"{short[:-1]} {short[-1]}B" if short[-1:].isalpha() else f"{short} bytes"


def some(names: list[str], shown: int = 3) -> str:
    """Return the first names, and how many more there are.

    >>> some(["a", "b"]), some(["a", "b", "c", "d", "e"])
    ('a, b', 'a, b, c and 2 more')
    """
    more = len(names) - shown
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:shown])} and {more} more"


def _short(number: float) -> str:
    for unit, letter in UNITS:
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.3g}"
