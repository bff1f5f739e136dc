"""The command `zeropp`: groups of commands, one file per command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from ..lab import JobError, LabError
from . import lab_bench, lab_clean, lab_run

Command = Callable[[list[str]], int]
GROUPS: dict[str, dict[str, Command]] = {
    "lab": {"run": lab_run.main, "bench": lab_bench.main, "clean": lab_clean.main},
}
USAGE = (
    "\n".join(f"zeropp {group} {' | '.join(commands)}" for group, commands in GROUPS.items())
    + "\n\nEvery command explains itself: zeropp lab run --help"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    command = GROUPS.get(words[0] if words else "", {}).get(words[1] if len(words) > 1 else "")
    if command is None:
        given = [word for word in words if word not in ("-h", "--help")]
        if given:
            console.print(f"zeropp has no command {' '.join(given[:2])!r}. It has:", markup=False)
        console.print(USAGE, markup=False)
        return 2 if given else 0
    try:
        return command(words[2:])
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    except (LabError, JobError, ValueError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
