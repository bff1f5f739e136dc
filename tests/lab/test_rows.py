from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from zeropp import Config
from zeropp.lab.rows import BASELINE, DEFAULT, NOT_RUN, ROWS, find_row


def test_the_rows_are_what_a_user_would_otherwise_pick() -> None:
    names = [row.name for row in ROWS]
    assert names == [
        *("fsdp2", "wire16", "wire16-accumulate", "wire16-two-hop", "wire16-reshard", "hsdp"),
        *("qwz", "hpz", "qgz", "paper", "default", "unrotated", "four-bit", "deepspeed", "deepspeed-hpz"),
    ]
    assert find_row(BASELINE).config == Config.wire16()
    assert find_row(DEFAULT).config == Config()
    assert "cannot run on CPU" in NOT_RUN["DeepSpeed qwZ, qgZ"]


def test_each_technique_differs_from_the_16_bit_route_in_itself_alone() -> None:
    plain = find_row("wire16-two-hop").config
    assert plain is not None

    def changed(name: str) -> set[str]:
        config = find_row(name).config
        return {key for key, value in vars(plain).items() if getattr(config, key) != value}

    assert changed("qwz") == {"weights"}
    assert changed("hpz") == {"secondary"}
    assert changed("qgz") == {"gradients_in_node", "gradients_across"}
    assert find_row("unrotated").config == replace(Config(), rotate=False)


def test_rows_that_need_several_ranks_a_node_say_so() -> None:
    ours = [row for row in ROWS if row.engine == "fsdp2"]
    assert [row.name for row in ours if row.why_not(nodes=4, ranks_per_node=1)] == ["wire16-reshard"]
    assert find_row("deepspeed-hpz").why_not(nodes=4, ranks_per_node=1)
    assert not any(row.why_not(nodes=2, ranks_per_node=2) for row in ours)


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_a_peer_that_is_not_installed_says_so() -> None:
    says = find_row("deepspeed").why_not(nodes=2, ranks_per_node=2)
    assert says == "DeepSpeed is not installed: pip install 'zeropp[deepspeed]'"


def test_a_row_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="row is 'qwx'; expected one of fsdp2, wire16"):
        find_row("qwx")
