"""The README's tour of the code names every file of the core. (Links are checked in test_docs.py.)"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINKS = re.findall(r"\]\(([\w./-]+?)(?:#[\w-]+)?\)", (ROOT / "README.md").read_text())


def test_every_file_of_the_core_is_named() -> None:
    core = [*(ROOT / "zeropp").glob("*.py"), *(ROOT / "zeropp/comm").glob("*.py")]
    files = {str(path.relative_to(ROOT)) for path in core if not path.name.startswith("__")}
    assert files - set(LINKS) == set()


def test_every_room_is_named() -> None:
    rooms = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "zeropp").glob("*/__init__.py")}
    named = {"/".join(link.split("/")[:2]) for link in LINKS if link.startswith("zeropp/")}
    assert rooms - named == set()
