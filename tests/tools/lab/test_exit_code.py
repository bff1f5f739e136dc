from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zeropp.tools.lab import exit_code


@pytest.mark.parametrize(
    ("code", "reported", "ends_with"),
    [
        ("pass", "0", 0),
        ("import sys; sys.exit(3)", "3", 3),
        ("import os; os.kill(os.getpid(), 9)", "-9", 137),
    ],
)
def test_a_rank_writes_its_exit_code_and_exits_with_it(
    tmp_path: Path, code: str, reported: str, ends_with: int
) -> None:
    done = subprocess.run(
        [sys.executable, exit_code.__file__, str(tmp_path), "-c", code], env=os.environ | {"RANK": "5"}
    )
    assert [file.name for file in tmp_path.iterdir()] == ["5"]
    assert (tmp_path / "5").read_text() == reported
    assert done.returncode == ends_with
