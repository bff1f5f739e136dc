"""`zeropp lab clean`: remove the processes and networks of killed labs."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from ..lab import clean
from .options import read_options


@dataclass
class Options:
    """End the processes of labs whose owner was killed. The kernel then removes their networks.

    Labs in use are unaffected."""


def main(arguments: list[str]) -> int:
    read_options(Options, arguments, "lab clean")
    console = Console(highlight=False)
    killed = clean()
    for pid, command in killed.items():
        console.print(f"ended {pid}: {command}", markup=False)
    console.print(f"{len(killed)} processes of killed labs ended" if killed else "nothing to clean")
    return 0
