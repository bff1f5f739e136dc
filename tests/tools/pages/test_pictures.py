"""The files in docs/pictures equal the output of benchmarks/pictures.py."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[3] / "docs"
NAMES = ("two-hops.svg", "step.svg", "bench.svg")


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    script: Any = import_module("benchmarks.pictures")
    found: dict[str, str] = script.draw_all()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_up_to_date(drawn: dict[str, str], name: str) -> None:
    assert (DOCS / "pictures" / name).read_text() == drawn[name], "run python benchmarks/pictures.py"
    ElementTree.fromstring(drawn[name])  # browsers show invalid XML in part
    assert len(drawn) == len(NAMES)


def test_pictures_show_the_measured_numbers(drawn: dict[str, str]) -> None:
    plain, ours = json.loads((DOCS / "data" / "steps.json").read_text())
    across = [sum(row[-1] for row in step["sent"]) for step in (plain, ours)]
    assert f"{across[0] / across[1]:.1f}x fewer bytes" in drawn["two-hops.svg"]
    assert f"{plain['seconds'] / ours['seconds']:.1f}x as fast" in drawn["step.svg"]
    assert "2.72x to 2.96x the throughput" in drawn["bench.svg"]  # of docs/data/bench-paper.json
    for step in (plain, ours):
        assert [phase[0] for phase in step["phases"]] == ["forward", "backward", "optimizer"]
        assert all(0 <= start <= end <= step["seconds"] for _, start, end, _ in step["spans"])
