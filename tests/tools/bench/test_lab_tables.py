"""Tables of measured steps in README and docs are the output of benchmarks/lab_tables.py for docs/data."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def test_pages_have_the_tables_of_the_numbers() -> None:
    script: Any = import_module("benchmarks.lab_tables")
    found: dict[str, list[list[str]]] = script.all_tables()
    assert set(found) == {"README.md", "docs/choose.md", "docs/lab-results.md"}
    for page, tables in found.items():
        text = (ROOT / page).read_text()
        assert tables
        for rows in tables:
            assert len(rows) > 2
            assert "\n".join(rows) in text, f"{page}: run python benchmarks/lab_tables.py"
