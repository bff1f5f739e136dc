"""The command `zeropp`: one file per command, imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from rich.console import Console

from ..lab import JobError, LabError

COMMANDS = {
    "train": "train",
    "demo": "demo",
    "compare": "compare",
    "export": "export",
    "doctor": "doctor",
    "plan": "plan",
    "lab run": "lab_run",
    "lab bench": "lab_bench",
    "lab clean": "lab_clean",
}
"""What a user types, and the file in this folder that does it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    name = next((name for name in COMMANDS if words[: len(name.split())] == name.split()), None)
    if name is None:
        given = [word for word in words if word not in ("-h", "--help")]
        if given:
            console.print(f"zeropp has no command {' '.join(given[:2])!r}. It has:", markup=False)
        console.print(_usage(), markup=False)
        return 2 if given else 0
    command = import_module(f".{COMMANDS[name]}", __name__).main
    try:
        return int(command(words[len(name.split()) :]))
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    except (LabError, JobError, ValueError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1


def _usage() -> str:
    """One line per first word: `zeropp lab run | bench | clean`."""
    second_words: dict[str, list[str]] = {}
    for name in COMMANDS:
        first, *second = name.split()
        second_words.setdefault(first, []).extend(second)
    lines = [f"zeropp {first} {' | '.join(second)}".rstrip() for first, second in second_words.items()]
    return "\n".join(lines) + "\n\nEvery command explains itself: zeropp train --help"
