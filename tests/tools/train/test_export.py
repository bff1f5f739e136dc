from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import Ranks
from tests.tools.models.samples import HF_CONFIGS, SMALL, hugging_face, tokens
from zeropp.tools.models.loading import ModelConfig, build_model
from zeropp.tools.models.sharding import build_sharded
from zeropp.tools.train.export import export


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    """Change all weights, also norms, which are initialized to one, and biases, which are initialized to
    zero."""
    for parameter in model.parameters():
        parameter.add_(0.05).mul_(1.5)


def logits_of_folder(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model.eval()(tokens()).logits  # type: ignore[no-any-return]


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model.eval()(tokens())  # type: ignore[no-any-return]


@pytest.mark.parametrize("tied", [False, True])
def test_the_exported_llama_computes_the_same_logits(tied: bool, tmp_path: Path) -> None:
    model = build_model(replace(SMALL, tied=tied), seed=1)
    disturb(model)
    export(model, tmp_path / "exported")
    torch.testing.assert_close(logits_of_folder(tmp_path / "exported"), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", list(HF_CONFIGS))
def test_an_exported_hugging_face_model_loads_again(kind: str, tmp_path: Path) -> None:
    model = build_model(hugging_face(kind, tmp_path), seed=1)
    disturb(model)
    export(model, tmp_path / "exported")
    assert torch.equal(logits_of_folder(tmp_path / "exported"), logits(model))
    again = build_model(
        ModelConfig(f"hf:{tmp_path}/exported"), seed=2
    )  # weights from the folder, not from the seed
    assert torch.equal(logits(again), logits(model))


def export_sharded(config: ModelConfig, folder: Path) -> Tensor:
    model = build_sharded(config, seed=1, mesh=init_device_mesh("cpu", (2,)))
    disturb(model)
    export(model, folder)
    return logits(model)


@pytest.mark.parametrize("kind", ["gpt", "gpt2"])
def test_shards_are_gathered(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    config = replace(SMALL, tied=True) if kind == "gpt" else hugging_face(kind, tmp_path)
    config = replace(config, activation_checkpointing=True)  # which puts wrappers into parameters' names
    expected = ranks.run(export_sharded, config, tmp_path / "exported", world=2)
    torch.testing.assert_close(logits_of_folder(tmp_path / "exported"), expected[0], rtol=1e-4, atol=1e-5)


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ValueError, match="is not empty; expected a new or an empty folder"):
        export(build_model(SMALL, seed=0), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes"]


def test_other_modules_than_those_of_build_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot export a Linear; expected a model made by build_model"):
        export(nn.Linear(2, 2), tmp_path / "exported")
