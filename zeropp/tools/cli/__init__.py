"""The command `zeropp`. Each of its commands is a file of this folder, imported when the command runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from ... import __version__
from ..quick_import import import_quickly
from .errors import print_error, print_interrupted
from .watcher import watch_rank


class Command(NamedTuple):
    file: str
    """File of this folder whose `main` runs the command."""
    description: str
    is_watched: bool = False
    """Whether a watcher process runs each rank under torchrun: see watcher.py."""


COMMANDS = {
    "train": Command("train", "train a model, on one rank, or on many under torchrun"),
    "demo": Command("demo", "train a small GPT with plain FSDP2 and with zeropp, and compare the runs"),
    "compare": Command("compare", "compare training runs"),
    "export": Command("export", "export a checkpoint as a Hugging Face folder"),
    "doctor": Command(
        "doctor", "check and measure this cluster, under torchrun, in two minutes", is_watched=True
    ),
    "plan": Command("plan", "predict time, bytes and memory of a step, without the cluster"),
    "lab run": Command("lab_run", "run a torchrun script on a cluster of network namespaces"),
    "lab bench": Command("lab_bench", "measure every strategy on such a cluster, with shaped links"),
    "lab clean": Command("lab_clean", "remove the processes and networks of killed labs"),
}
"""All commands, by their words on the command line."""
HELP = ("-h", "--help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = next((name for name in COMMANDS if words[: len(name.split())] == name.split()), None)
    if name is None:
        return _main_without_command(words)
    if COMMANDS[name].is_watched and "RANK" in os.environ:
        code = watch_rank()
        if code is not None:
            return code
    try:
        command = import_quickly(f"{__name__}.{COMMANDS[name].file}").main
        return int(command(words[len(name.split()) :]))
    except ModuleNotFoundError as error:
        is_tyro = error.name == "tyro"
        needs = "zeropp's commands need tyro, which is not installed; run pip install 'zeropp[cli]'"
        print_error(ValueError(needs) if is_tyro else error)
        return 1
    except KeyboardInterrupt:
        print_interrupted()
        return 130
    except Exception as error:
        print_error(error)
        return 1


def _main_without_command(words: list[str]) -> int:
    """Print the version, the list of commands, or an error for an unknown command. Return the exit code."""
    if words[:1] == ["--version"]:
        _print(f"zeropp {__version__}")
        return 0
    group = [word for word in words if word not in HELP]
    commands = [name for name in COMMANDS if group == [] or name.split()[:-1] == group]
    if commands:
        _print(_usage(commands))
        return 0
    message = f"zeropp has no command {' '.join(group[:2])!r}; expected one of\n\n"
    _print(message + _usage(list(COMMANDS)), to_stderr=True)
    return 2


def _usage(names: list[str]) -> str:
    width = max(map(len, names))
    lines = [f"  zeropp {name:{width}}   {COMMANDS[name].description}" for name in names]
    return "\n".join([*lines, "", f"For the options of a command: zeropp {names[0]} --help"])


def _print(text: str, to_stderr: bool = False) -> None:
    Console(stderr=to_stderr, highlight=False, soft_wrap=True).print(text, markup=False)
