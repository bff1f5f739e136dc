"""Who imports whom: the imports of every file, against the list in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import zeropp
from zeropp.fsdp2 import versions as fsdp

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "zeropp"
TOOLS = "tools"
PUBLIC = "zeropp"
"""The public API: what `zeropp/__init__.py` has."""

MAY_KNOW_FSDP2 = {
    "zeropp/fsdp2/units.py": "is the adapter",
    "zeropp/fsdp2/gradients.py": "is the part of it for gradients",
    "zeropp/fsdp2/versions.py": "has what differs of it between versions",
    "tests/fsdp2/test_units.py": "tests it, on FSDP2's own objects",
    "tests/fsdp2/test_versions.py": "takes parts of FSDP2 away",
    "tests/test_handle.py": "looks at which comms FSDP2 would call",
    "benchmarks/host_cost.py": "times FSDP2's own comms beside ours",
}
"""Files that use what is private in FSDP2, and why."""


class Import(NamedTuple):
    """One import of something of ours. Modules are named from the package on: `comm.ledger`, or `zeropp`."""

    importer: str
    imported: str
    name: str
    """What is taken from it; for a module as a whole, the module's name."""


def sources() -> dict[str, Path]:
    """Every file of the package, by its name; a room's `__init__` has the room's."""
    named = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts) or PUBLIC] = path
    return named


SOURCES = sources()


def imports_of(module: str) -> Iterator[Import]:
    path = SOURCES[module]
    folder = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            absolute = [alias.name.split(".") for alias in node.names]
            for parts in absolute:
                if parts[0] == PUBLIC:
                    yield Import(module, ".".join(parts[1:]) or PUBLIC, parts[-1])
        elif isinstance(node, ast.ImportFrom):
            start = (node.module or "").split(".") if node.module else []
            if node.level:
                start = [PUBLIC, *folder[: len(folder) + 1 - node.level], *start]
            if start[0] == PUBLIC:
                for alias in node.names:
                    inside = ".".join([*start[1:], alias.name])
                    yield Import(
                        module,
                        inside if inside in SOURCES else ".".join(start[1:]) or PUBLIC,
                        alias.name,
                    )


def room(module: str) -> str:
    """The folder of a module, or the module itself at the top level; each folder of `tools` is a room."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == TOOLS else parts[0]


def covers(drawn: str, module: str) -> bool:
    """Whether a name of the list stands for the module: it is the module, or its room."""
    return module == drawn or module.startswith(f"{drawn}.")


def drawn_edges() -> list[tuple[str, str]]:
    """The list in CONTRIBUTING.md: importer, imported."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"\*\*Who may import whom\.\*\*.*?```\n(.*?)```", text, re.DOTALL)
    edges = []
    for line in block.splitlines():
        importers, arrow, imported = re.sub(r"\(.*\)", "", line).partition("->")
        if arrow:
            names = [name.strip() for name in imported.split(",") if name.strip()]
            edges += [(by.strip(), name) for by in importers.split(",") for name in names or [""]]
    return edges


EDGES = drawn_edges()
IMPORTS = [
    found for module in SOURCES for found in imports_of(module) if room(found.imported) != room(module)
]


def needed_by(edge: tuple[str, str], found: Import) -> bool:
    return covers(edge[0], found.importer) and covers(edge[1], found.imported)


def test_every_import_is_drawn() -> None:
    wrong = [found for found in IMPORTS if not any(needed_by(edge, found) for edge in EDGES)]
    assert not wrong, "draw it in CONTRIBUTING.md, or find another way"


def test_the_library_imports_no_tool() -> None:
    """One door: `ZeroPP.report` imports its page when it is called. `__main__` is a command."""
    tools = [found for found in IMPORTS if found.imported.split(".")[0] == TOOLS]
    library = {(found.importer, found.imported) for found in tools if found.importer.split(".")[0] != TOOLS}
    assert library == {
        ("__main__", "tools.cli"),
        ("_handle", "tools.pages.traffic"),
        ("_handle", "tools.atomic_files"),
    }


def test_every_line_is_needed_and_names_what_there_is() -> None:
    named = {name for edge in EDGES for name in edge if name}
    assert named <= set(SOURCES)
    assert {room(module) for module in SOURCES} == {room(name) for name in named}
    unused = [edge for edge in EDGES if edge[1] and not any(needed_by(edge, found) for found in IMPORTS)]
    assert unused == []


def test_nobody_imports_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for importer, imported in EDGES:
        graph.setdefault(room(importer), set()).add(room(imported))
    assert list(TopologicalSorter(graph).static_order())  # raises for a circle


def test_rooms_around_the_core_take_public_names() -> None:
    taken = {found.name for found in IMPORTS if found.imported == PUBLIC}
    assert taken <= {*zeropp.__all__, "__version__"}


def test_the_list_is_read_as_it_is_written() -> None:
    assert ("comm", "quant") in EDGES
    assert ("config", "") in EDGES
    assert Import("fsdp2.units", "comm", "Piece") in IMPORTS
    assert Import("tools.plan.timeline", "comm.execution", "pipelined") in IMPORTS
    assert Import("tools.plan.trace", PUBLIC, "Ledger") in IMPORTS
    assert not any(needed_by(edge, Import("comm.wire", "fsdp2.units", "")) for edge in EDGES)


def private_names() -> set[str]:
    """Attributes of FSDP2's objects that the adapter reads."""
    tables = (fsdp.MODULE, fsdp.STATE, fsdp.GROUP, fsdp.CONTEXT, fsdp.PARAM, fsdp.READER.group)
    parts = {part for table in tables for path in table for part in path.split(".")}
    return {part for part in parts if part.startswith("_")}


def knows_fsdp2(path: Path) -> bool:
    private = private_names()
    for node in ast.walk(ast.parse(path.read_text())):
        imported = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
        if any(re.match(r"torch\.distributed\.fsdp\.(\w+\.)*_", name) for name in imported):
            return True
        if isinstance(node, ast.Attribute) and node.attr in private:
            return True
    return False


@pytest.mark.parametrize("folder", ["zeropp", "tests", "benchmarks", "examples"])
def test_only_the_adapter_knows_what_is_private_in_fsdp2(folder: str) -> None:
    files = {str(path.relative_to(ROOT)): path for path in (ROOT / folder).rglob("*.py")}
    knowing = {name for name, path in files.items() if knows_fsdp2(path)}
    assert knowing == {name for name in MAY_KNOW_FSDP2 if name.startswith(f"{folder}/")}


def test_files_of_the_package_stay_short() -> None:
    """CONTRIBUTING.md: under 400 lines."""
    assert [name for name, path in SOURCES.items() if len(path.read_text().splitlines()) >= 400] == []
