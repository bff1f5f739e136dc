from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from zeropp.tools.plan.dry_run import dry_run
from zeropp.tools.plan.models import Model, PlanError, are_alike, find_blocks, loss_of, resolve
from zeropp.tools.plan.scenario import Scenario
from zeropp.tools.strategies import find_strategy

USERS_OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(6))
        self.head = nn.Linear(32, 50, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def build():
    return Net()

def not_a_model():
    return 7
"""

LLAMA = """{
  "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 6,
  "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100,
  "tie_word_embeddings": true
}"""


class _Flat(nn.Module):
    """A model that returns what a test passes in."""

    def __init__(self, returned: object = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.returned = returned

    def forward(self, tokens: Tensor) -> object:
        return self.returned


class _DataDependent(_Flat):
    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.one_hot(tokens, 8).float() if bool((tokens > 3).any()) else tokens.float()
        return self.layers[0](x).mean()  # type: ignore[no-any-return]


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_own.py").write_text(USERS_OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "users_own", raising=False)
    return "users_own"


def _parameters(spec: str) -> int:
    return dry_run(Scenario(resolve(spec), 2, 2, sequence=16), find_strategy("default")).parameters


def test_a_function_of_the_users(users_module: str) -> None:
    assert _parameters(f"{users_module}:build") == 50 * 32 + 6 * (32 * 32 + 32) + 32 * 50


def test_a_hugging_face_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LLAMA)
    per_layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert _parameters(f"hf:{tmp_path}") == 100 * 64 + 6 * per_layer + 64


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("2B", "model is '2B'; expected one of tiny, 125M"),
        ("hf:nowhere", "model is 'hf:nowhere': 'hf:nowhere': expected a config.json"),
        ("no_such_module:build", "the module 'no_such_module' cannot be imported"),
        ("users_own:nothing", "users_own has no function 'nothing'"),
        ("users_own:not_a_model", "users_own:not_a_model returned a int; expected a torch.nn.Module"),
    ],
)
def test_invalid_specifications_raise_an_error_with_the_way_out(
    users_module: str, spec: str, message: str
) -> None:
    with pytest.raises(PlanError) as raised:
        resolve(spec).build()
    assert message in str(raised.value)


def test_a_model_that_looks_at_its_data_is_refused() -> None:
    scenario = Scenario(Model("curious", _DataDependent), 2, 2)
    with pytest.raises(PlanError, match=r"the model 'curious' depends on the content of a tensor"):
        dry_run(scenario, find_strategy("default"))
    assert not torch.distributed.is_initialized()  # the process group is gone, too


def test_layers_must_be_in_a_list() -> None:
    with pytest.raises(PlanError, match=r"layers of Linear were not found; put them into an nn.ModuleList"):
        find_blocks(nn.Linear(2, 2))


def test_settings_that_differ_make_layers_differ() -> None:
    blocks = nn.ModuleList(nn.MultiheadAttention(8, 2) for _ in range(3))
    for position, block in enumerate(blocks):
        block.layer_idx = position  # type: ignore[assignment]
    assert are_alike(blocks)
    blocks[1].dropout = 0.5  # type: ignore[assignment]
    assert not are_alike(blocks)


class _Picky(nn.Module):
    """A model whose second argument is named after targets."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        assert targets is not None
        return targets.float().mean()


class _Masked(nn.Module):
    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is None
        return tokens.float().mean()


def test_only_models_that_take_targets_get_them() -> None:
    assert loss_of(_Picky(), 2, 5) == 0.0
    assert loss_of(_Masked(), 2, 5) == 0.0


def test_a_model_may_return_its_loss_or_logits() -> None:
    logits = torch.randn(2, 5, 11)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(10, dtype=torch.long))
    assert torch.equal(loss_of(_Flat(logits), 2, 5), expected)
    assert loss_of(_Flat(torch.tensor(3.0)), 2, 5) == 3.0
    with pytest.raises(PlanError, match=r"_Flat returned a tensor of shape \(4,\); expected its loss"):
        loss_of(_Flat(torch.zeros(4)), 2, 5)
    with pytest.raises(PlanError, match="_Flat returned NoneType"):
        loss_of(_Flat(), 2, 5)
