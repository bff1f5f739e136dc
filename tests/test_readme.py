"""README.md: short, with its claim, its status and its commands. (test_docs.py checks links and tables.)"""

from __future__ import annotations

import re
from pathlib import Path

from zeropp.tools.bench.results import Results

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MAX_BYTES = 9000


def test_it_is_short() -> None:
    assert len(README.encode()) < MAX_BYTES, "move details to the page in docs/ that they belong to"


def test_the_claim_follows_from_the_table() -> None:
    paper = Results.load(ROOT / "docs/data/bench-paper.json")
    bytes_of = {
        (name, count): cell.sent_bytes
        for name in ("wire16", "default")
        for count in (1, 8)
        if (cell := paper.cell(name, count)) is not None
    }
    less = [round(bytes_of["wire16", count] / bytes_of["default", count]) for count in (1, 8)]
    assert less == [6, 47]
    assert f"send {less[0]}x fewer bytes between nodes per step ({less[1]}x with 8 micro-batches)" in README


def test_it_has_one_picture_and_one_table() -> None:
    assert README.count("![") == 1
    assert len(re.findall(r"^\|[-|]+\|$", README, re.MULTILINE)) == 1


def test_commands_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("train", "test"):
        assert f"    make {target} " in README
        assert f"\n{target}: " in makefile
    assert "-m zeropp doctor" in README
