from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.tools.models.samples import CONTEXT, HF_CONFIGS, SMALL, VOCABULARY, hugging_face, tokens
from zeropp.tools.models.gpt import SIZES
from zeropp.tools.models.loading import (
    ModelConfig,
    Shape,
    blocks_of,
    build_model,
    check_fits,
    flops_per_token,
    parameter_count,
    shape_of,
)


@pytest.fixture(params=["gpt", *HF_CONFIGS])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> ModelConfig:
    return SMALL if request.param == "gpt" else hugging_face(request.param, tmp_path)


def test_all_models_have_one_interface(config: ModelConfig) -> None:
    model = build_model(config, seed=0)
    assert model(tokens()).shape == (2, CONTEXT, VOCABULARY)
    assert shape_of(model) == Shape(layers=3, width=48, vocab_size=VOCABULARY, context=CONTEXT)
    blocks = blocks_of(model)
    assert len(blocks) == 3
    assert len({type(block) for block in blocks}) == 1
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_weights_come_from_the_seed(config: ModelConfig) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build_model(config, seed=3)
    if config.hugging_face:
        assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second, other = build_model(config, seed=3), build_model(config, seed=4)
    with torch.no_grad():
        assert torch.equal(first(tokens()), second(tokens()))
        assert not torch.equal(first(tokens()), other(tokens()))


def test_a_model_on_meta_has_the_same_shape(config: ModelConfig) -> None:
    model, outline = build_model(config, seed=0), build_model(config, seed=0, device="meta")
    assert all(parameter.is_meta for parameter in outline.parameters())
    assert shape_of(outline) == shape_of(model)
    assert parameter_count(outline) == parameter_count(model)
    assert flops_per_token(outline, CONTEXT) == flops_per_token(model, CONTEXT)


def test_flops_are_those_of_the_matrix_products() -> None:
    per_block = 4 * 48 * 48 + 3 * 48 * 128 + 2 * 48  # attention, SwiGLU of 128, two norms
    head, norm, attention = VOCABULARY * 48, 48, 12 * 3 * 48 * CONTEXT
    expected = 6 * (3 * per_block + head + norm) + attention
    for tied in (False, True):  # a lookup counts no FLOPs; a tied embedding counts as the head
        model = build_model(replace(SMALL, tied=tied), seed=0)
        assert flops_per_token(model, CONTEXT) == expected
        assert parameter_count(model) == 3 * per_block + head + norm + (0 if tied else head)


def test_overrides_change_a_size() -> None:
    config = ModelConfig("125M", layers=2, width=96, heads=4, context=8, vocab_size=300, tied=False).gpt()
    changed = (config.layers, config.width, config.heads, config.context, config.vocab_size, config.tied)
    assert changed == (2, 96, 4, 8, 300, False)
    assert ModelConfig("125M").gpt() == SIZES["125M"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "2B"}, "source is '2B'; expected one of 'tiny', .* or 'hf:' and a path"),
        ({"source": "hf:here", "layers": 2}, "layers=2 cannot change 'hf:here'; edit its config.json"),
        ({"precision": "fp16"}, "precision is 'fp16'; expected one of 'auto', 'fp32', 'bf16'"),
        ({"heads": 5}, "width 192 does not divide into 5 heads"),
    ],
)
def test_bad_models_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**arguments)


def test_a_hugging_face_path_must_have_a_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a config.json or a local folder that has one"):
        build_model(ModelConfig(f"hf:{tmp_path}"), seed=0)


def test_a_hugging_face_model_can_be_named_by_its_config_file(tmp_path: Path) -> None:
    by_folder = hugging_face("llama", tmp_path)
    by_file = ModelConfig(f"{by_folder.source}/config.json")
    first, second = build_model(by_folder, seed=1), build_model(by_file, seed=1)
    with torch.no_grad():
        assert torch.equal(first(tokens()), second(tokens()))


def test_code_from_a_model_folder_is_not_run(tmp_path: Path) -> None:
    hugging_face("llama", tmp_path)
    path = tmp_path / "llama" / "config.json"
    content = json.loads(path.read_text()) | {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    path.write_text(json.dumps(content))
    (path.parent / "mine.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ValueError, match="contains custom code"):
        build_model(ModelConfig(f"hf:{path.parent}"), seed=0)


def test_blocks_are_not_mistaken_for_the_experts_inside() -> None:
    def block() -> nn.Module:
        experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))
        return nn.ModuleDict({"norm": nn.LayerNorm(4), "experts": experts})

    layers = nn.ModuleList(block() for _ in range(2))
    model = nn.ModuleDict({"embedding": nn.Embedding(1000, 4), "layers": layers})
    assert blocks_of(model) == list(layers)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no ModuleList with parameters"):
        blocks_of(nn.Linear(2, 2))


def test_data_must_fit_the_model(config: ModelConfig) -> None:
    model = build_model(config, seed=0, device="meta")
    check_fits(model, sequence=CONTEXT, vocab_size=VOCABULARY)
    with pytest.raises(ValueError, match="sequence is 17 tokens, the model's context 16; shorten"):
        check_fits(model, sequence=17, vocab_size=VOCABULARY)
    with pytest.raises(ValueError, match=r"ids up to 255, the model's vocabulary is 50; .* at least 256"):
        check_fits(model, sequence=CONTEXT, vocab_size=256)
