from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F  # noqa: N812

from tests.ranks import Ranks
from zeropp.train.models import ModelConfig, build_model
from zeropp.train.sharding import build_sharded

SMALL = ModelConfig("tiny", layers=3, width=48, heads=3, context=16, vocab_size=50)


def tokens() -> Tensor:
    return torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(tokens()).float().flatten(0, 1), tokens().roll(-1, 1).flatten())


def whole(model: nn.Module) -> dict[str, Any]:
    options = StateDictOptions(full_state_dict=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return {name: value.clone() for name, value in state.items()}


def gradients(model: nn.Module) -> list[Tensor]:
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]


def train(config: ModelConfig, world: int) -> dict[str, Any]:
    """The first weights, then loss and gradients, all whole."""
    model = build_sharded(config, seed=5, mesh=init_device_mesh("cpu", (world,)))
    weights = whole(model)
    loss = loss_of(model)
    loss.backward()  # type: ignore[no-untyped-call]
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    return {
        "weights": weights,
        "loss": loss.item(),
        "gradients": gradients(model),
        "units": units,
        "dtypes": dtypes,
        "names": [name for name, _ in model.named_parameters()],
    }


@pytest.fixture(scope="module")
def unsharded() -> dict[str, Any]:
    model = build_model(SMALL, seed=5)
    loss = loss_of(model)
    loss.backward()  # type: ignore[no-untyped-call]
    return {"weights": model.state_dict(), "loss": loss.item(), "gradients": gradients(model)}


@pytest.mark.parametrize("world", [2, 3])
def test_shards_have_the_weights_and_gradients_of_the_whole(
    ranks: Ranks, unsharded: dict[str, Any], world: int
) -> None:
    for result in ranks.run(train, SMALL, world, world=world):
        assert result["units"] == 4  # three blocks and the rest
        assert result["weights"].keys() == unsharded["weights"].keys()
        for name, value in result["weights"].items():
            assert torch.equal(value, unsharded["weights"][name]), name
        assert result["loss"] == pytest.approx(unsharded["loss"], rel=1e-6)
        torch.testing.assert_close(result["gradients"], unsharded["gradients"], rtol=1e-4, atol=1e-6)
