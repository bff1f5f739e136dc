"""The labels that zeropp leaves in a profile (torch.profiler): written and read here, and nowhere else."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Collective = Literal["all_gather", "reduce_scatter"]

_TEXT = re.compile(r"zeropp::(all_gather|reduce_scatter)\.([a-z-]+) \((.*)\)")


class Label(NamedTuple):
    """What part of which collective of which unit a stretch of time was.

    >>> str(Label("all_gather", "across", "blocks.0"))
    'zeropp::all_gather.across (blocks.0)'
    >>> Label.read("zeropp::all_gather.across (blocks.0)")
    Label(collective='all_gather', part='across', unit='blocks.0')
    """

    collective: Collective
    part: str
    """A hop, or "encode", "recode", "decode"."""
    unit: str

    def __str__(self) -> str:
        return f"zeropp::{self.collective}.{self.part} ({self.unit})"

    @classmethod
    def read(cls, text: str) -> Label | None:
        """The label, or None if the text is not one of zeropp's."""
        match = _TEXT.fullmatch(text)
        return None if match is None else cls(*match.groups())  # type: ignore[arg-type]  # one of the two
