"""A compact GPT: RMSNorm, rotary positions, SwiGLU, `scaled_dot_product_attention`.

It has Llama's arithmetic, so `tools/train/export.py` exports it as a Llama by renaming parameters. The
benchmark trains its other architecture, which is closer to GPT-2: `GPTConfig.architecture`.

[Note: Weights from a seed]
Each parameter has a separate random generator, seeded with the seed and the parameter's index in the model. A
rank draws the whole parameter and keeps its shard. So the weights depend on the configuration and the seed,
but not on the number of ranks. A model that is sharded on the meta device gets the same weights as a model
built on one device. CPU and GPU generators differ, so the weights depend on the type of device.

With architecture="gpt2", one generator draws all parameters in order, on every rank. The weights equal those
of torch's own layers after `torch.manual_seed`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F  # noqa: N812

INITIAL_STD = 0.02
HIDDEN_MULTIPLE = 64  # the SwiGLU's width is rounded up to a multiple of a matrix product's tile
Architecture = Literal["llama", "gpt2"]


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    >>> GPTConfig(layers=2, width=96, heads=3, context=64).hidden
    256
    >>> GPTConfig(layers=2, width=96, heads=5, context=64)
    Traceback (most recent call last):
    ...
    ValueError: GPTConfig: width 96 does not divide into 5 heads of an even width; change width or heads
    """

    layers: int
    """Transformer blocks."""
    width: int
    """Width of the residual stream."""
    heads: int
    """Attention heads of width / heads each."""
    context: int
    """Maximal sequence length."""
    vocab_size: int = 256
    """Number of token ids; 256 for bytes."""
    tied: bool = False
    """True: the embedding and the head share one matrix."""
    rotary_base: float = 10_000.0
    """Base of the rotary frequencies: the lowest one has a period of about 2 pi * rotary_base positions."""
    norm_epsilon: float = 1e-5
    """Constant that RMSNorm adds to the mean square."""
    architecture: Architecture = "llama"
    """"llama": rotary positions and a SwiGLU, with GPT-2's small initial weights. "gpt2": learned positions,
    one matrix for query, key and value, and a GELU of four times the width, with torch's default initial
    weights; the benchmark's figures were measured with it. Both have RMSNorm and no biases."""

    def __post_init__(self) -> None:
        if self.architecture not in get_args(Architecture):
            expected = " or ".join(map(repr, get_args(Architecture)))
            raise ValueError(f"GPTConfig.architecture is {self.architecture!r}; expected {expected}")
        for name in ("layers", "width", "heads", "context", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPTConfig.{name} is {getattr(self, name)}; expected at least 1")
        if self.width % (2 * self.heads):  # rotary turns pairs
            raise ValueError(
                f"GPTConfig: width {self.width} does not divide into {self.heads} heads of an even width; "
                "change width or heads"
            )

    @property
    def hidden(self) -> int:
        """Width inside the feed-forward layer: 4 times the width for a GELU, 8/3 for a SwiGLU, which has one
        more matrix. So a block has 12 * width**2 weights in both architectures."""
        if self.architecture == "gpt2":
            return 4 * self.width
        return math.ceil(self.width * 8 / 3 / HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE


SIZES = {
    "tiny": GPTConfig(layers=4, width=192, heads=6, context=128),
    "125M": GPTConfig(layers=12, width=768, heads=12, context=1024, vocab_size=50304, tied=True),
    "350M": GPTConfig(layers=24, width=1024, heads=16, context=1024, vocab_size=50304, tied=True),
    "1.3B": GPTConfig(layers=24, width=2048, heads=16, context=2048, vocab_size=50304, tied=True),
    "18B": GPTConfig(layers=40, width=6144, heads=32, context=2048, vocab_size=50304, tied=True),
}
"""Models by name. "tiny" reads bytes. The others have GPT-2's vocabulary, padded to a multiple of 128."""


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.rotary_base = config.rotary_base
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (self.heads, -1)
        query, key, value = (
            projection(x).unflatten(-1, heads).transpose(1, 2)  # [B, H, T, D]
            for projection in (self.query, self.key, self.value)
        )
        query, key = apply_rotary(query, self.rotary_base), apply_rotary(key, self.rotary_base)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def apply_rotary(x: Tensor, base: float) -> Tensor:
    """Apply rotary positions to `x` [B, H, T, D]: rotate pairs (d, d + D/2) by position * base**(-2d/D).

    The angles are computed in every call, in fp32. A buffer would be empty after construction on the meta
    device, and FSDP2's mixed precision would round angles that are passed as an argument to bf16.
    """
    length, width = x.shape[-2:]
    exponents = torch.arange(0, width, 2, device=x.device, dtype=torch.float32) / -width
    positions = torch.arange(length, device=x.device, dtype=torch.float32)
    angles = torch.outer(positions, base**exponents)  # [T, D/2]
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.output = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return torch.add(x, self.mlp(self.mlp_norm(x)))


class GPT2Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, T, D]
            for part in self.query_key_value(self.attention_norm(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return torch.add(x, self.down(F.gelu(self.up(self.mlp_norm(x)))))


class LearnedPositions(nn.Module):
    """Adds a learned vector to each position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.context, config.width))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        return x + (self.weight if length == len(self.weight) else self.weight[:length])


class GPT(nn.Module):
    """Maps tokens to next-token logits. After construction on meta, call `to_empty` and `reset_parameters`.

    >>> model = GPT(GPTConfig(layers=1, width=32, heads=2, context=8), seed=1)
    >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
    torch.Size([2, 8, 256])
    """

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.seed = seed
        is_gpt2 = config.architecture == "gpt2"
        block = GPT2Block if is_gpt2 else Block
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.positions = LearnedPositions(config) if is_gpt2 else nn.Identity()
        self.blocks = nn.ModuleList(block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.positions(self.embedding(tokens))  # [B, T, width]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize whole or sharded parameters. [Note: Weights from a seed]"""
        if self.config.tied:  # in every reset: `to_empty` separates the two names
            self.head.weight = self.embedding.weight
        device = self.norm.weight.device
        if device.type == "meta":
            return
        generator = torch.Generator(device).manual_seed(self.seed)
        for index, (name, parameter) in enumerate(self.named_parameters()):
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            whole = torch.empty(parameter.shape, device=device, dtype=parameter.dtype)
            if self.config.architecture == "gpt2":
                _draw_as_torch_does(whole, name, generator)
            else:
                self._draw(whole, name, generator.manual_seed((self.seed << 20) + index))
            if isinstance(parameter, DTensor):  # no communication: every rank has the whole parameter
                whole = distribute_tensor(
                    whole, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.copy_(whole)

    def _draw(self, whole: Tensor, name: str, generator: torch.Generator) -> None:
        """Draw small weights. As in GPT-2, output projections of blocks get smaller weights in deeper models,
        so that the variance of the residual stream does not grow with the number of blocks."""
        is_output = name.endswith(".output.weight")
        std = INITIAL_STD / math.sqrt(2 * self.config.layers) if is_output else INITIAL_STD
        whole.normal_(std=std, generator=generator)


def _draw_as_torch_does(whole: Tensor, name: str, generator: torch.Generator) -> None:
    """Draw the default weights of `nn.Embedding` and `nn.Linear`, and small learned positions."""
    if name == "embedding.weight":
        whole.normal_(generator=generator)
    elif name == "positions.weight":
        whole.normal_(generator=generator).mul_(INITIAL_STD)
    else:
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
