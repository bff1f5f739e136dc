"""Labels of zeropp in a profile of torch.profiler. All code that writes and reads them is here."""

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
    """Label of an interval in a profile: a part of a collective of a unit.

    >>> str(Label("all_gather", "across", "blocks.0"))
    'zeropp::all_gather.across (blocks.0)'
    >>> Label.read("zeropp::all_gather.across (blocks.0)")
    Label(collective='all_gather', part='across', unit='blocks.0')
    """

    collective: Collective
    part: str
    """A hop, "encode", "recode", "decode", or "wait": the training thread waits for a comm thread."""
    unit: str

    def __str__(self) -> str:
        return f"zeropp::{self.collective}.{self.part} ({self.unit})"

    @classmethod
    def read(cls, text: str) -> Label | None:
        """Parse a label. None: the text is not a label of zeropp."""
        match = _TEXT.fullmatch(text)
        return None if match is None else cls(*match.groups())  # type: ignore[arg-type]  # one of the two


def labelled(text: str) -> AbstractContextManager[Any]:
    """Return a context that labels its operations, if a profile is being taken."""
    # Without a profile, record_function would cost about as much as the operation inside it.
    return record_function(text) if profiler._is_profiler_enabled else _NO_PROFILE


def profile_all_threads(**options: Any) -> profile:
    """Return a profiler of all threads of the CPU, those of the hops (cpu/comm_threads.py) included.

    By default, torch profiles only the thread that starts the profile.
    """
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    return profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere, **options)
