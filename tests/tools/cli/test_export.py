"""`zeropp export` on a run of real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import Ranks
from tests.tools.train.runs import small_run, train_here
from zeropp import Config
from zeropp.tools.cli import main
from zeropp.tools.train.data import Loader
from zeropp.tools.train.metrics import FILE_NAME, Metrics


def test_an_exported_model_has_the_validation_loss_of_its_run(ranks: Ranks, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = small_run(tmp_path / "run", zeropp=Config.off(node_size=2))
    ranks.run(train_here, run)
    exported = tmp_path / "exported"
    assert main(["export", str(run.folder), str(exported)]) == 0
    assert {"config.json", "model.safetensors"} <= {file.name for file in exported.iterdir()}

    model = AutoModelForCausalLM.from_pretrained(exported)
    losses = []
    for rank in range(4):
        data = Loader(run.data, rank=rank, world=4, sequence=32, batch=2, seed=run.seed)
        for tokens, targets in data.validation(run.evaluation.batches):
            logits = model(tokens).logits
            losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item())
    expected = Metrics(run.folder / FILE_NAME).evaluations[-1].validation_loss
    assert sum(losses) / len(losses) == pytest.approx(expected, rel=1e-4)


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "has no checkpoint; expected the folder of a run" in capsys.readouterr().err
    (tmp_path / "state.json").write_text('{"format": 0}')
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "has another format" in capsys.readouterr().err
