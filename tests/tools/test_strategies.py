from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import get_args

import pytest

from zeropp import Config
from zeropp.tools.strategies import (
    BASELINE,
    DEFAULT,
    NOT_RUN,
    PRESETS,
    STRATEGIES,
    PresetName,
    find_strategy,
    preset_code,
)


def test_every_preset_has_a_config_and_its_code() -> None:
    assert set(PRESETS) == set(get_args(PresetName))
    for name, preset in PRESETS.items():
        assert eval(preset_code(name), {"Config": Config}) == preset()
    same_name = [strategy for strategy in STRATEGIES if strategy.name in ("paper", DEFAULT, "four-bit")]
    assert [strategy.config for strategy in same_name] == [
        PRESETS["paper"](), PRESETS["default"](), PRESETS["four-bit"]()
    ]  # fmt: skip


def test_names_and_configs_of_the_strategies() -> None:
    names = [strategy.name for strategy in STRATEGIES]
    assert names == [
        *("fsdp2", "wire16", "wire16-overlap", "wire16-accumulate", "wire16-two-hop", "wire16-reshard"),
        *("hsdp", "hfsdp", "qwz", "hpz", "qgz", "paper", "default", "default-serial", "unrotated"),
        *("four-bit", "auto", "deepspeed", "deepspeed-hpz"),
    ]
    assert find_strategy(BASELINE).config == Config.wire16(overlap=False)
    overlapping = {strategy.name for strategy in STRATEGIES if strategy.overlaps}
    assert overlapping.isdisjoint({BASELINE, "fsdp2", "hsdp", "default-serial", "deepspeed"})
    assert {"wire16-overlap", "hfsdp", DEFAULT} < overlapping
    assert find_strategy(DEFAULT).config == Config()
    assert "cannot run on CPU" in NOT_RUN["DeepSpeed qwZ, qgZ"]


def test_each_technique_differs_from_the_16_bit_route_in_itself_alone() -> None:
    plain = find_strategy("wire16-two-hop").config
    assert plain is not None

    def changed(name: str) -> set[str]:
        config = find_strategy(name).config
        return {key for key, value in vars(plain).items() if getattr(config, key) != value}

    assert changed("qwz") == {"weights"}
    assert changed("hpz") == {"secondary"}
    assert changed("qgz") == {"gradients_in_node", "gradients_across"}
    assert find_strategy("unrotated").config == replace(Config(), rotate=False)


def test_strategies_that_need_several_ranks_a_node_say_so() -> None:
    ours = [strategy for strategy in STRATEGIES if strategy.engine == "fsdp2"]
    assert [strategy.name for strategy in ours if strategy.why_not(nodes=4, ranks_per_node=1)] == [
        "wire16-reshard"
    ]
    assert find_strategy("deepspeed-hpz").why_not(nodes=4, ranks_per_node=1)
    assert not any(strategy.why_not(nodes=2, ranks_per_node=2) for strategy in ours)


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_a_peer_that_is_not_installed_says_so() -> None:
    reason = find_strategy("deepspeed").why_not(nodes=2, ranks_per_node=2)
    assert reason == "DeepSpeed is not installed: pip install 'zeropp[deepspeed]'"


def test_a_strategy_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="strategy is 'qwx'; expected one of fsdp2, wire16"):
        find_strategy("qwx")
