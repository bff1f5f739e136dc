from __future__ import annotations

import pytest

from zeropp.tools.cli import main


def test_lab_clean_with_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "clean"]) == 0
    assert "nothing to clean" in capsys.readouterr().out
