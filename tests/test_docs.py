"""README and docs: links go somewhere, tables can be read, and the tables of files are complete.

(`make docs` checks that the site builds.)
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TABLE = re.compile(r"^\|[-| ]+\|$", re.MULTILINE)
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
MAX_COLUMNS = 7
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()


def anchors(page: Path) -> set[str]:
    """Return the names that links use for the headings of a page, in the repository and in the site."""
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


def test_every_page_is_on_the_site() -> None:
    site, home = (ROOT / "mkdocs.yml").read_text(), (ROOT / "docs/README.md").read_text()
    names = [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"]
    assert [name for name in names if f": {name}\n" not in site or f"({name})" not in home] == []


def test_every_file_of_the_library_is_in_a_table() -> None:
    """Each has one row, and each row names a file. Files of the tools are named by folder."""
    rows = re.findall(r"^\| \[[\w./]+\]\(\.\./(zeropp/[\w./]+)\) \| \S", ARCHITECTURE, re.MULTILINE)
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "zeropp").rglob("[!_]*.py")}
    files |= {str(path.relative_to(ROOT)) for path in (ROOT / "zeropp").rglob("_[!_]*.py")}
    library = {name for name in files if not name.startswith("zeropp/tools/")}
    assert len(library) > 40
    assert sorted(rows) == sorted(library), "docs/architecture.md: correct the table of files"


def test_every_folder_of_the_tools_is_in_a_table() -> None:
    tools = ROOT / "zeropp/tools"
    rows = set(re.findall(r"^\| `(\w+)` \| \S", ARCHITECTURE, re.MULTILINE))
    assert rows == {path.parent.name for path in tools.glob("*/__init__.py")}
    files = {path.name for path in tools.glob("[!_]*.py")}
    assert [name for name in files if f"(../zeropp/tools/{name})" not in ARCHITECTURE] == []


def test_every_runtime_patch_is_named() -> None:
    patches = ARCHITECTURE.partition("\n## Runtime patches\n")[2]
    assert len(re.findall(r"^\*\*.*\(\.\./zeropp/[\w./]+\)\)$", patches, re.MULTILINE)) == 5
    assert patches.count("\n- Without effect: ") == 5
