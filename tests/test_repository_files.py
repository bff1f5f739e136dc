"""Files for GitHub and pre-commit: valid YAML, and in step with the rest of the repository."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FILES = [ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff", *sorted((ROOT / ".github").rglob("*.yml"))]


def read(path: Path) -> Any:
    yaml: Any = import_module("yaml")  # comes with mkdocs, without types
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_is_yaml(path: Path) -> None:
    assert isinstance(read(path), dict)


def test_pre_commit_has_the_versions_of_constraints() -> None:
    (repo,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    pinned = {version for hook in repo["hooks"] for version in hook["additional_dependencies"]}
    constraints = (ROOT / "constraints.txt").read_text().split("\n")
    assert pinned == {line for line in constraints if re.match("(ruff|mypy)==", line)}
    assert len(pinned) == 2


def test_the_workflow_runs_what_we_run() -> None:
    steps = read(ROOT / ".github/workflows/test.yml")["jobs"]["test"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == ["make test"]
    assert "Never run" in (ROOT / ".github/workflows/test.yml").read_text()


def test_bug_reports_ask_for_the_doctor() -> None:
    fields = read(ROOT / ".github/ISSUE_TEMPLATE/bug_report.yml")["body"]
    required = [
        field["attributes"]["label"] for field in fields if field.get("validations", {}).get("required")
    ]
    assert "Output of `zeropp doctor`" in required


def test_the_citation_names_the_paper() -> None:
    citation = read(ROOT / "CITATION.cff")
    (paper,) = citation["references"]
    assert paper["url"] in (ROOT / "README.md").read_text()
    assert "version" not in citation  # zeropp/__init__.py has it
