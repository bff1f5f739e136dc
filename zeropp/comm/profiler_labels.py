"""The labels that zeropp leaves in a profile (torch.profiler): written and read here, and nowhere else."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile, record_function

Collective = Literal["all_gather", "reduce_scatter"]

_NO_PROFILE: AbstractContextManager[None] = nullcontext()
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
    """A hop, or "encode", "recode", "decode"; or "wait": the training thread for what runs beside it."""
    unit: str

    def __str__(self) -> str:
        return f"zeropp::{self.collective}.{self.part} ({self.unit})"

    @classmethod
    def read(cls, text: str) -> Label | None:
        """The label, or None if the text is not one of zeropp's."""
        match = _TEXT.fullmatch(text)
        return None if match is None else cls(*match.groups())  # type: ignore[arg-type]  # one of the two


def labelled(text: str) -> AbstractContextManager[Any]:
    """Gives what runs inside this label in a profile, if one is being taken: else a label would cost about as
    much as the operation inside it."""
    return record_function(text) if profiler._is_profiler_enabled else _NO_PROFILE


def profile_all_threads(**options: Any) -> profile:
    """A profile of the CPU that has the hops in it: there they run in threads (cpu/comm_threads.py), and by
    default torch's profile is of the thread that takes it."""
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    return profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere, **options)
