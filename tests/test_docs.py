"""README and docs: links go somewhere, tables can be read, and the tour is whole. That the site builds is
`make docs`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TABLE = re.compile(r"^\|[-| ]+\|$", re.MULTILINE)
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
MAX_COLUMNS = 7


def anchors(page: Path) -> set[str]:
    """What headings of a page are called in links, in the repository's view of it and in the site."""
    text = FENCE.sub("", page.read_text())
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {word.strip().replace(" ", "-") for word in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_go_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(FENCE.sub("", page.read_text())):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{path} is not there"
        assert target.is_relative_to(ROOT)
        assert not anchor or anchor in anchors(target), f"{path} has no heading #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_narrow_enough_to_read(page: Path) -> None:
    columns = [line.count("|") - 1 for line in TABLE.findall(page.read_text())]
    assert max(columns, default=0) <= MAX_COLUMNS, "put the wide one into docs/data, and link it"


def test_every_table_and_picture_is_linked() -> None:
    linked = {
        (page.parent / path).resolve() for page in PAGES for path, _ in LINK.findall(page.read_text()) if path
    }
    figures = {*(ROOT / "docs/data").glob("*.csv"), *(ROOT / "docs/pictures").iterdir()}
    assert figures - linked == set()


def test_the_tour_names_every_file_of_the_core() -> None:
    tour = (ROOT / "README.md").read_text().partition("## A tour of the code")[2].partition("\n## ")[0]
    core = [path for folder in (".", "comm", "quant") for path in (ROOT / "zeropp" / folder).glob("[!_]*.py")]
    assert len(core) > 40
    names = [str(path.relative_to(ROOT)) for path in core]
    assert [name for name in names if f"({name})" not in tour] == []
