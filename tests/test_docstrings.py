"""Docstrings say what a thing is, without its name: none goes on with a sentence that the name has begun."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("zeropp", "tests", "examples", "benchmarks")
GOES_ON = re.compile(r'"""(Of|That) ')


def test_docstrings_begin_by_themselves() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    assert [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if GOES_ON.search(line)
    ] == []


def test_what_is_not_collected_has_no_doctests() -> None:
    """addopts in pyproject.toml leaves these out, because they import frameworks."""
    files = list((ROOT / "zeropp" / "integrations").glob("*.py"))
    assert files
    assert [path.name for path in files if ">>>" in path.read_text()] == []
