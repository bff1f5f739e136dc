"""Command lines, parsed into a dataclass."""

from __future__ import annotations

from typing import TypeVar

import tyro

from .errors import is_first_of_node

T = TypeVar("T")


def read_options(kind: type[T], arguments: list[str], command: str, default: T | None = None) -> T:
    """Parse `arguments` into the dataclass `kind`.

    Help and invalid options end the process. The first rank of each node prints the message."""
    prints = is_first_of_node()
    prog = f"zeropp {command}"
    if default is None:
        return tyro.cli(kind, args=arguments, prog=prog, console_outputs=prints)
    return tyro.cli(kind, args=arguments, prog=prog, console_outputs=prints, default=default)
