"""The command as a user calls it."""

from __future__ import annotations

import pytest

from zeropp.cli import main


def test_a_command_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "walk"]) != 0
    assert "zeropp has no command 'lab walk'" in capsys.readouterr().err


def test_without_a_command_it_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "zeropp lab run | bench | clean" in capsys.readouterr().err
