import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp import Config

PLAIN: dict[str, Any] = {
    "weights": "none",
    "secondary": False,
    "gradients_in_node": "none",
    "gradients_across": "none",
    "rotate": False,
}


def test_presets() -> None:
    assert (Config().weights, Config().gradients_in_node, Config().gradients_across) == (
        "int8",
        "int8",
        "int4",
    )
    assert Config().secondary
    paper, wire16, off = Config.paper(), Config.wire16(), Config.off()
    assert (paper.weights, paper.gradients_in_node, paper.gradients_across) == ("int8", "int4", "int4")
    assert (wire16.weights, wire16.route, wire16.secondary) == ("bf16", "flat", False)
    assert (off.weights, off.gradients_across, off.route, off.secondary) == ("none", "none", "flat", False)
    assert Config.four_bit().weights == "delta-int4"
    assert Config().rotates
    assert Config.four_bit().rotates
    assert not any(preset.rotates for preset in (paper, wire16, off))
    assert Config.wire16(route="two-hop", node_size=2).gradients_across == "bf16"


def test_it_is_frozen_and_documented() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().weights = "int4"  # type: ignore[misc]
    source = Path(__file__).parents[1].joinpath("zeropp/config.py").read_text()
    for field in dataclasses.fields(Config):
        declaration = source.index(f"\n    {field.name}: ")
        assert source[declaration:].splitlines()[2].startswith('    """'), f"{field.name} has no docstring"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "int3"}, "Config.weights is 'int3'; expected one of 'none', 'bf16', 'int8', 'int4'"),
        ({"gradients_in_node": None}, "Config.gradients_in_node is None"),
        ({"gradients_across": "INT4"}, "Config.gradients_across is 'INT4'"),
        ({"route": "ring"}, "Config.route is 'ring'; expected one of 'two-hop', 'flat'"),
        ({"secondary": 1}, "Config.secondary is 1; expected True or False"),
        ({"route": "flat"}, "use route='two-hop', or secondary=False"),
        ({"route": "flat", "secondary": False}, "a flat route has one hop: give both one codec"),
        ({"rotate": 1}, "Config.rotate is 1; expected True, False or 'auto'"),
        ({"rotate": True, "block_size": 32}, "Config.block_size is 32 with rotate=True; expected 64 or more"),
        ({**PLAIN, "rotate": True}, "both are about integers: use 'int8' or 'int4'"),
        ({**PLAIN, "rounding": "stochastic"}, "both are about integers: use 'int8' or 'int4'"),
        ({"rounding": "up"}, "Config.rounding is 'up'; expected one of 'nearest', 'stochastic'"),
        ({"error_feedback": True, "gradients_across": "bf16"}, "Config.error_feedback is True with"),
        ({"weights": "delta-int4", "secondary": False}, "differences are taken from the node shard"),
        ({"delta_in_node": "bf16"}, "both are about differences: use weights='delta-int4'"),
        ({"refresh_every": 10}, "both are about differences: use weights='delta-int4'"),
        ({"weights": "delta-int4", "refresh_every": -1}, "Config.refresh_every is -1; expected a number of"),
        ({"seed": -1}, "Config.seed is -1; expected an integer from 0 to 2^64 - 1"),
        ({"seed": 3}, "Config.seed is 3 with rounding='nearest', which has no noise"),
        ({"gradients_pending": "int8"}, "is 'int8'; expected one of 'fp32', 'bf16'"),
        ({**PLAIN, "route": "flat", "gradients_pending": "bf16"}, "no gradients wait inside the node"),
        ({"node_size": 0}, "Config.node_size is 0; expected a positive number of ranks"),
        ({"node_size": "all"}, "Config.node_size is 'all'"),
        ({"node_size": True}, "Config.node_size is True"),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Config(**changes)
    assert message in str(error.value)


@given(st.integers(-2, 40) | st.sampled_from(["auto", True, 2.0, "2", None]))
def test_chunks_are_a_number_in_range(chunks: Any) -> None:
    if chunks == "auto" or (type(chunks) is int and 1 <= chunks <= 16):
        assert Config(chunks=chunks).chunks == chunks
    else:
        with pytest.raises(ValueError, match="expected a number from 1 to 16, or 'auto'"):
            Config(chunks=chunks)


@pytest.mark.parametrize(
    ("changes", "rotates"),
    [
        ({"gradients_in_node": "bf16", "gradients_across": "bf16"}, False),
        ({"gradients_in_node": "bf16"}, True),
        ({"block_size": 32}, False),
        ({"block_size": 64}, True),
        ({"rotate": False}, False),
    ],
)
def test_rotation_that_nobody_asked_for_is_where_it_can_be(changes: dict[str, Any], rotates: bool) -> None:
    assert Config(**changes).rotates == rotates
    assert dataclasses.replace(Config(), **changes).rotates == rotates


def test_presets_without_rotation_stay_so_when_changed() -> None:
    assert not Config.paper(block_size=256).rotates
    assert not Config.wire16(gradients_in_node="int4", gradients_across="int4").rotates
    assert Config.paper(rotate=True).rotates


@given(st.integers(-10, 10_000) | st.sampled_from([128.0, "128", None, True]))
def test_block_size_is_a_power_of_two_in_range(block_size: Any) -> None:
    if type(block_size) is int and block_size in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        assert Config(block_size=block_size).block_size == block_size
    else:
        with pytest.raises(ValueError, match="expected a power of two from 32 to 4096"):
            Config(block_size=block_size)


def test_from_deepspeed_reads_a_dict_and_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given_config = {
        "train_batch_size": 8,
        "zero_optimization": {
            "stage": 3,
            "zero_quantized_weights": True,
            "zero_hpz_partition_size": 16,
            "zero_quantized_gradients": True,
            "overlap_comm": True,
        },
    }
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(given_config))
    for source in (given_config, path, str(path)):
        caplog.clear()
        assert Config.from_deepspeed(source) == Config.paper(node_size=16)
        assert "does not translate: train_batch_size, zero_optimization.overlap_comm" in caplog.text


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, Config.off()),
        ({"zero_quantized_weights": True}, Config(**PLAIN | {"weights": "int8"})),
        ({"zero_hpz_partition_size": 4}, Config(**PLAIN | {"secondary": True, "node_size": 4})),
        (
            {"zero_quantized_gradients": True},
            Config(**PLAIN | {"gradients_in_node": "int4", "gradients_across": "int4"}),
        ),
    ],
)
def test_from_deepspeed_one_by_one(
    keys: dict[str, Any], expected: Config, caplog: pytest.LogCaptureFixture
) -> None:
    assert Config.from_deepspeed({"zero_optimization": keys}) == expected
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "zero_optimization = None"),
        ([], "zero_optimization = None"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage is 2"),
        ({"zero_optimization": {"zero_quantized_weights": "auto"}}, "zero_quantized_weights is 'auto'"),
        ({"zero_optimization": {"zero_hpz_partition_size": 0}}, "zero_hpz_partition_size is 0"),
    ],
)
def test_from_deepspeed_bad_input(source: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Config.from_deepspeed(source)
    assert message in str(error.value)
