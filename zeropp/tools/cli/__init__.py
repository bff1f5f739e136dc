"""The command `zeropp`: one file per command, imported when it is called."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from ... import __version__
from ..quick_import import import_quickly
from .errors import tell, tell_interrupted
from .watcher import watch_rank


class Command(NamedTuple):
    file: str
    """Name of a file in this folder, whose `main` does it."""
    description: str
    is_watched: bool = False
    """Whether each rank has a watcher, under torchrun."""


COMMANDS = {
    "train": Command("train", "train a model, on one rank or under torchrun on many"),
    "demo": Command("demo", "train a small GPT with plain FSDP2 and with zeropp, and compare them"),
    "compare": Command("compare", "show training runs side by side"),
    "export": Command("export", "write a checkpoint as a Hugging Face folder"),
    "doctor": Command(
        "doctor", "check and measure the cluster at hand, under torchrun, in two minutes", is_watched=True
    ),
    "plan": Command("plan", "predict time, bytes and memory of a step, before there is a cluster"),
    "lab run": Command("lab_run", "run a torchrun script on nodes that are network namespaces"),
    "lab bench": Command("lab_bench", "measure every strategy on such nodes, with shaped links"),
    "lab clean": Command("lab_clean", "remove what killed labs left"),
}
"""All commands, by what a user types."""
HELP = ("-h", "--help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = next((name for name in COMMANDS if words[: len(name.split())] == name.split()), None)
    if name is None:
        return _answer(words)
    if COMMANDS[name].is_watched and "RANK" in os.environ:
        code = watch_rank()
        if code is not None:
            return code
    command = import_quickly(f"{__name__}.{COMMANDS[name].file}").main
    try:
        return int(command(words[len(name.split()) :]))
    except KeyboardInterrupt:
        tell_interrupted()
        return 130
    except Exception as error:
        tell(error)
        return 1


def _answer(words: list[str]) -> int:
    """What is not a command: a question for help or the version, or a mistake."""
    if words[:1] == ["--version"]:
        _print(f"zeropp {__version__}")
        return 0
    given = [word for word in words if word not in HELP]
    below = [name for name in COMMANDS if given == [] or name.split()[:-1] == given]
    if below:
        _print(_usage(below))
        return 0
    wrong = f"zeropp has no command {' '.join(given[:2])!r}. It has:\n\n"
    _print(wrong + _usage(list(COMMANDS)), to_stderr=True)
    return 2


def _usage(names: list[str]) -> str:
    width = max(map(len, names))
    lines = [f"  zeropp {name:{width}}   {COMMANDS[name].description}" for name in names]
    return "\n".join([*lines, "", f"Each explains its options: zeropp {names[0]} --help"])


def _print(text: str, to_stderr: bool = False) -> None:
    Console(stderr=to_stderr, highlight=False, soft_wrap=True).print(text, markup=False)
