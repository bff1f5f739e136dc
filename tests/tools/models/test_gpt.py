from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from zeropp.tools.models.gpt import GPT, INITIAL_STD, SIZES, GPTConfig, apply_rotary

SMALL = GPTConfig(layers=3, width=48, heads=3, context=32, vocab_size=50)
SMALL_GPT2 = replace(SMALL, architecture="gpt2")
both_architectures = pytest.mark.parametrize("config", [SMALL, SMALL_GPT2], ids=["llama", "gpt2"])


def tokens(batch: int = 2, length: int = 32) -> Tensor:
    return torch.randint(SMALL.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("size", "in_blocks", "total"),
    [
        ("tiny", 1_771_008, 1_869_504),
        ("125M", 84_953_088, 123_587_328),
        ("350M", 303_611_904, 355_124_224),
        ("1.3B", 1_214_349_312, 1_317_373_952),
        ("18B", 18_119_884_800, 18_428_958_720),
    ],
)
def test_sizes_have_the_published_number_of_parameters(size: str, in_blocks: int, total: int) -> None:
    with torch.device("meta"):
        model = GPT(SIZES[size])
    assert sum(p.numel() for p in model.blocks.parameters()) == in_blocks
    assert sum(p.numel() for p in model.parameters()) == total
    rule = 12 * SIZES[size].layers * SIZES[size].width ** 2  # the ZeRO++ paper's count
    assert in_blocks == pytest.approx(rule, rel=0.01)


@both_architectures
def test_a_token_sees_the_past_and_not_the_future(config: GPTConfig) -> None:
    model = GPT(config)
    changed = tokens()
    changed[:, 20] = (changed[:, 20] + 1) % SMALL.vocab_size
    difference = (model(tokens()) - model(changed)).abs().amax(dim=(0, 2))  # [T]
    assert (difference[:20] == 0).all()
    assert (difference[20:] > 0).all()


def test_attention_depends_on_distances_only() -> None:
    query, key = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0)).expand(
        -1, 1, 1, 40, 16
    )
    scores = apply_rotary(query, 1e4)[0, 0] @ apply_rotary(key, 1e4)[0, 0].T  # [T, T]
    for distance in (0, 1, 17):
        same = scores.diagonal(-distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), rtol=1e-4, atol=1e-4)
    assert scores.diagonal(-1)[0] != pytest.approx(scores.diagonal(-17)[0].item(), abs=1e-3)


def test_rotation_is_exact_in_bf16_up_to_the_last_rounding() -> None:
    x = torch.randn(1, 1, 2048, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(apply_rotary(x, 1e4), apply_rotary(x.float(), 1e4).bfloat16())


@both_architectures
def test_weights_depend_on_the_seed_only(config: GPTConfig) -> None:
    torch.manual_seed(1)
    first = GPT(config, seed=3).state_dict()
    torch.manual_seed(2)
    with torch.device("meta"):
        deferred = GPT(config, seed=3)
    deferred.to_empty(device="cpu")
    deferred.reset_parameters()
    for name, value in deferred.state_dict().items():
        assert torch.equal(first[name], value), name
    other = GPT(config, seed=4)
    assert not torch.equal(first["head.weight"], other.head.weight)


def test_gpt2_starts_with_the_default_weights_of_torch() -> None:
    """The benchmark's figures were measured with these weights."""
    state = GPT(SMALL_GPT2, seed=3).state_dict()
    torch.manual_seed(3)
    assert torch.equal(state["embedding.weight"], nn.Embedding(50, 48).weight)
    assert torch.equal(state["positions.weight"], torch.randn(32, 48) * 0.02)
    for block in ("blocks.0", "blocks.1", "blocks.2"):
        for name, (width, out) in {
            "query_key_value": (48, 144),
            "output": (48, 48),
            "up": (48, 192),
            "down": (192, 48),
        }.items():
            assert torch.equal(state[f"{block}.{name}.weight"], nn.Linear(width, out, bias=False).weight)
    assert torch.equal(state["head.weight"], nn.Linear(48, 50, bias=False).weight)


def test_learned_positions_accept_shorter_sequences() -> None:
    model = GPT(SMALL_GPT2)
    whole = model(tokens())
    torch.testing.assert_close(model(tokens()[:, :20]), whole[:, :20])
    same_token = torch.zeros(1, 32, dtype=torch.long)
    assert not torch.equal(model(same_token)[0, 0], model(same_token)[0, 1])


def test_output_projections_are_scaled_with_depth() -> None:
    model = GPT(GPTConfig(layers=8, width=192, heads=6, context=32))
    state = model.state_dict()
    for name, std in {
        "embedding": INITIAL_STD,
        "blocks.0.attention.query": INITIAL_STD,
        "blocks.7.mlp.gate": INITIAL_STD,
        "blocks.0.attention.output": INITIAL_STD / 4,
        "blocks.7.mlp.output": INITIAL_STD / 4,
        "head": INITIAL_STD,
    }.items():
        assert state[f"{name}.weight"].std().item() == pytest.approx(std, rel=0.03), name
    loss = torch.nn.functional.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten())
    assert loss.item() == pytest.approx(math.log(256), rel=0.03)  # the loss of a uniform guess


@pytest.mark.parametrize("deferred", [False, True])
def test_a_tied_head_is_the_embedding(deferred: bool) -> None:
    config = GPTConfig(layers=1, width=32, heads=2, context=8, tied=True)
    with torch.device("meta" if deferred else "cpu"):
        model = GPT(config)
    if deferred:
        model.to_empty(device="cpu")
        model.reset_parameters()
    assert model.head.weight is model.embedding.weight
    model(torch.zeros(1, 8, dtype=torch.long)).square().sum().backward()
    used_by_the_head = cast(Tensor, model.embedding.weight.grad)[1:]  # only token 0 was looked up
    assert used_by_the_head.abs().amin() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "width 48 does not divide into 5 heads"),
        ({"heads": 16}, "heads of an even width"),  # three wide
        ({"layers": 0}, "GPTConfig.layers is 0; expected at least 1"),
        ({"architecture": "gpt3"}, "GPTConfig.architecture is 'gpt3'; expected 'llama' or 'gpt2'"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**cast(Any, {"layers": 3, "width": 48, "heads": 3, "context": 32} | changes))
