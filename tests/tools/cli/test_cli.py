"""The command as a user calls it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from zeropp import __version__
from zeropp.tools.cli import COMMANDS, main


def test_a_command_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "walk"]) == 2
    said = capsys.readouterr()
    assert "zeropp has no command 'lab walk'" in said.err
    assert said.out == ""


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_says_what_each_command_does(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    said = capsys.readouterr()
    lines = [line.split() for line in said.out.splitlines()]
    for name, command in COMMANDS.items():
        assert ["zeropp", *name.split(), *command.description.split()] in lines
    assert said.err == ""


@pytest.mark.parametrize("arguments", [["lab"], ["lab", "--help"]])
def test_a_group_of_commands_has_help_of_its_own(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "zeropp lab bench" in said
    assert "zeropp train" not in said


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"zeropp {__version__}\n"


def test_help_does_not_wait_for_torch() -> None:
    """To import it would take seconds. A process of its own: torch is here already."""
    code = "import sys, zeropp.tools.cli; zeropp.tools.cli.main(['--help']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    *_, imported = done.stdout.splitlines()
    assert not {"torch", "numpy", "tyro"} & set(imported.split())
