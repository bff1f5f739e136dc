"""The command `zeropp` without one of its commands."""

from __future__ import annotations

import subprocess
import sys

import pytest

from zeropp import __version__
from zeropp.tools.cli import COMMANDS, main


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "walk"]) == 2
    output = capsys.readouterr()
    assert "zeropp has no command 'lab walk'" in output.err
    assert output.out == ""


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_describes_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    output = capsys.readouterr()
    lines = [line.split() for line in output.out.splitlines()]
    for name, command in COMMANDS.items():
        assert ["zeropp", *name.split(), *command.description.split()] in lines
    assert output.err == ""


@pytest.mark.parametrize("arguments", [["lab"], ["lab", "--help"]])
def test_a_group_of_commands_has_its_own_help(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "zeropp lab bench" in output
    assert "zeropp train" not in output


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"zeropp {__version__}\n"


def test_help_does_not_import_torch() -> None:
    """An import of torch takes seconds. The test needs a new process, because this one has torch."""
    code = "import sys, zeropp.tools.cli; zeropp.tools.cli.main(['--help']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    *_, imported = done.stdout.splitlines()
    assert not {"torch", "numpy", "tyro"} & set(imported.split())
