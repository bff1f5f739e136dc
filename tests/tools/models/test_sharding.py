from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F  # noqa: N812

import zeropp
from tests.ranks import Ranks
from tests.tools.models.samples import HF_CONFIGS, SMALL, hugging_face, tokens
from tests.tools.test_amx import DIES, DIES_UNCAPPED
from zeropp.tools import amx
from zeropp.tools.models import sharding
from zeropp.tools.models.loading import ModelConfig, Precision, blocks_of, build_model
from zeropp.tools.models.sharding import build_sharded, has_fast_bf16, shard


def backward(model: nn.Module) -> float:
    """Zero the gradients, run a backward, and return the loss."""
    model.zero_grad()
    loss = F.cross_entropy(model(tokens()).float().flatten(0, 1), tokens().roll(-1, 1).flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def gradient(model: nn.Module) -> Tensor:
    """Return all gradients, unsharded, in one row."""
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    return torch.cat([getattr(g, "full_tensor", lambda g=g: g)().flatten() for g in gradients])


def train(config: ModelConfig) -> dict[str, Any]:
    """Return the initial weights, loss and gradient, all unsharded, and the gradient with zeropp."""
    model = build_sharded(config, seed=5, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    weights: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    seen: list[torch.dtype] = []  # output of the first block's norm, in each of its forwards
    norm = next(module for module in blocks_of(model)[0].modules() if "Norm" in type(module).__name__)
    handle = norm.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    result = {
        "loss": backward(model),
        "gradient": gradient(model),
        "weights": {name: value.clone() for name, value in weights.items()},
        "units": sum(isinstance(module, FSDPModule) for module in model.modules()),
        "kept as": {parameter.dtype for parameter in model.parameters()},
        "computed in": seen.copy(),
    }
    handle.remove()
    zpp = zeropp.apply(model, zeropp.Config(node_size=1))
    backward(model)
    return result | {"with zeropp": gradient(model), "summary": zpp.summary()}


def assert_equals_unsharded(result: dict[str, Any], config: ModelConfig, tolerance: float = 1e-5) -> None:
    model = build_model(config, seed=5)
    assert result["loss"] == pytest.approx(backward(model), rel=tolerance)
    expected = gradient(model)
    assert (result["gradient"] - expected).norm() < tolerance * expected.norm()
    # int4 rounds to a seventh of a block's largest value. For normal values and blocks of 128, the error is
    # 12%.
    assert 0 < (result["with zeropp"] - expected).norm() < 0.2 * expected.norm()
    assert result["weights"].keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(result["weights"][name], value), name


@pytest.mark.parametrize("world", [2, 3])
def test_shards_have_the_weights_and_gradients_of_the_unsharded_model(ranks: Ranks, world: int) -> None:
    for result in ranks.run(train, SMALL, world=world):
        assert_equals_unsharded(result, SMALL)
        assert result["units"] == 4  # three blocks and the rest


@pytest.mark.parametrize("kind", list(HF_CONFIGS))
def test_hugging_face_models_are_sharded_block_by_block(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    config = hugging_face(kind, tmp_path)
    result = ranks.run(train, config, world=2)[0]
    assert_equals_unsharded(result, config)
    assert result["units"] == 4


def test_a_tied_head_stays_tied(ranks: Ranks) -> None:
    config = replace(SMALL, tied=True)
    assert_equals_unsharded(ranks.run(train, config, world=2)[0], config)


def test_activation_checkpointing_recomputes_the_same_gradients(ranks: Ranks) -> None:
    plain = ranks.run(train, SMALL, world=2)[0]
    twice = ranks.run(train, replace(SMALL, activation_checkpointing=True), world=2)[0]
    assert len(plain["computed in"]) == 1
    assert len(twice["computed in"]) == 2
    assert torch.equal(twice["gradient"], plain["gradient"])
    assert_equals_unsharded(twice, SMALL)


def test_bf16_is_the_precision_of_compute_only(ranks: Ranks) -> None:
    result = ranks.run(train, replace(SMALL, precision="bf16"), world=2)[0]
    assert result["computed in"] == [torch.bfloat16]
    assert result["kept as"] == {torch.float32}
    assert result["gradient"].dtype == torch.float32
    assert_equals_unsharded(result, SMALL, tolerance=0.02)


def test_auto_precision_follows_the_device(ranks: Ranks) -> None:
    expected = torch.bfloat16 if has_fast_bf16(torch.device("cpu")) else torch.float32
    assert ranks.run(train, replace(SMALL, precision="auto"), world=2)[0]["computed in"] == [expected]


def compute_where_a_trial_dies(precision: Precision, trial: str, folder: Path) -> str:
    """Return the precision of compute, or the error, if the CPU of rank 1 announces AMX and its trial runs
    this code."""
    is_announced = dist.get_rank() == 1
    stand_in = partial(amx.make_bf16_safe, (sys.executable, "-c", trial), folder)
    with (
        patch.dict(os.environ),
        patch.object(amx, "announces_amx", lambda: is_announced),
        patch.object(sharding, "make_bf16_safe", stand_in),
    ):
        os.environ.pop(amx.CAP_VARIABLE, None)
        try:
            result = train(replace(SMALL, precision=precision))
        except ValueError as error:
            return str(error)
        assert (os.environ.get(amx.CAP_VARIABLE) == amx.CAP) == is_announced
    (dtype,) = result["computed in"]
    return str(dtype)


def test_a_cpu_that_cannot_do_bf16_decides_for_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """All ranks use the same precision, with a CPU that crashes, and with one that crashes without the
    cap."""
    dies, dies_uncapped = tmp_path / "dies", tmp_path / "dies uncapped"
    assert ranks.run(compute_where_a_trial_dies, "auto", DIES, dies, world=2) == ["torch.float32"] * 2
    first, second = ranks.run(compute_where_a_trial_dies, "bf16", DIES, dies, world=2)
    assert first == "precision is 'bf16'; a matrix product in bf16 would crash another rank; use 'fp32'"
    assert "the CPU announces AMX and cannot run it" in second
    capped = ranks.run(compute_where_a_trial_dies, "bf16", DIES_UNCAPPED, dies_uncapped, world=2)
    assert capped == ["torch.bfloat16"] * 2


def train_compiled(config: ModelConfig) -> tuple[dict[str, Any], int]:
    from torch._dynamo.utils import counters

    counters.clear()
    result = train(config)
    return result, counters["stats"]["unique_graphs"]


def test_blocks_share_compiled_code(ranks: Ranks) -> None:
    plain = replace(SMALL, layers=6)
    ((result, graphs),) = ranks.run(train_compiled, replace(plain, compile=True), world=1, timeout=300)
    model = build_model(plain, seed=5)
    assert result["loss"] == pytest.approx(backward(model), rel=1e-5)
    torch.testing.assert_close(result["gradient"], gradient(model), rtol=1e-4, atol=1e-6)
    assert 1 <= graphs <= 2  # instead of six, one per block


def shard_outline(config: ModelConfig) -> str:
    model = build_model(config, seed=0, device="meta")
    with pytest.raises(ValueError, match="HuggingFaceLM is on the meta device") as error:
        shard(model, init_device_mesh("cpu", (1,)))
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    return str(error.value)


def test_another_model_on_meta_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    assert "build it on the CPU" in ranks.run(shard_outline, hugging_face("llama", tmp_path), world=1)[0]
