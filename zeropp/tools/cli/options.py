"""The command line of one command, read into a dataclass."""

from __future__ import annotations

from typing import TypeVar

import tyro

from .errors import is_first_of_node

T = TypeVar("T")


def read_options(kind: type[T], arguments: list[str], command: str, default: T | None = None) -> T:
    """What was given for the fields of `kind`. Help and mistakes end the process, as tyro does; of the ranks
    of a node, the first one speaks."""
    speaks = is_first_of_node()
    prog = f"zeropp {command}"
    if default is None:
        return tyro.cli(kind, args=arguments, prog=prog, console_outputs=speaks)
    return tyro.cli(kind, args=arguments, prog=prog, console_outputs=speaks, default=default)
