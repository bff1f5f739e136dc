"""Command lines, and who speaks about them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from zeropp.tools.cli.options import read_options


@dataclass
class Options:
    """Bake bread."""

    loaves: int = 1
    """How many."""


def test_what_was_given_is_read() -> None:
    assert read_options(Options, ["--loaves", "3"], "bake") == Options(3)
    assert read_options(Options, [], "bake", Options(5)) == Options(5)


@pytest.mark.parametrize(("local_rank", "speaks"), [("0", True), ("1", False)])
def test_the_first_rank_of_a_node_says_what_is_wrong(
    local_rank: str, speaks: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit) as end:
        read_options(Options, ["--loafs", "3"], "bake")
    assert end.value.code == 2
    assert ("--loafs" in capsys.readouterr().err) == speaks
