"""Command lines, and the rank that prints their errors."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from zeropp.tools.cli.options import read_options


@dataclass
class Options:
    """Bake bread."""

    loaves: int = 1
    """How many."""


def test_options_are_parsed() -> None:
    assert read_options(Options, ["--loaves", "3"], "bake") == Options(3)
    assert read_options(Options, [], "bake", Options(5)) == Options(5)


@pytest.mark.parametrize(("local_rank", "prints"), [("0", True), ("1", False)])
def test_the_first_rank_of_a_node_prints_the_error(
    local_rank: str, prints: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit) as end:
        read_options(Options, ["--loafs", "3"], "bake")
    assert end.value.code == 2
    assert ("--loafs" in capsys.readouterr().err) == prints
