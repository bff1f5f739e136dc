"""The model of a run, ours or Hugging Face's, behind one interface: `model(tokens) -> logits`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from .gpt import GPT, SIZES, GPTConfig

HUGGING_FACE = "hf:"
Precision = Literal["auto", "fp32", "bf16"]


@dataclass(frozen=True)
class ModelConfig:
    """Which model to train, and how a device runs it.

    >>> ModelConfig("tiny", layers=2).gpt().layers
    2
    >>> ModelConfig("7B")
    Traceback (most recent call last):
    ...
    ValueError: ModelConfig.source is '7B'; expected one of 'tiny', '125M', '350M', '1.3B', '18B', \
or 'hf:' and a path
    """

    source: str = "tiny"
    """A size of our own GPT ("tiny", "125M", "350M", "1.3B", "18B"), or "hf:" and a local path: a folder with
    a Hugging Face causal LM, trained further from its weights, or a config.json, trained from random
    weights."""
    layers: int | None = None
    """Blocks, instead of the size's own. This and what follows is for our own GPT only."""
    width: int | None = None
    """Width of the residual stream, instead of the size's own."""
    heads: int | None = None
    """Attention heads, instead of the size's own."""
    context: int | None = None
    """The longest sequence, instead of the size's own."""
    vocab_size: int | None = None
    """Token ids are below this, instead of the size's own."""
    tied: bool | None = None
    """One matrix for embedding and head, instead of the size's own choice."""
    precision: Precision = "auto"
    """What matrix products are computed in; weights and sums stay fp32. "auto": bf16 on devices that are good
    at it, else fp32."""
    activation_checkpointing: bool = False
    """Keep only the inputs of every block, and compute the rest again in backward."""
    compile: bool = False
    """torch.compile, block by block."""

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            expected = ", ".join(map(repr, get_args(Precision)))
            raise ValueError(f"ModelConfig.precision is {self.precision!r}; expected one of {expected}")
        if self.hugging_face is None:
            self.gpt()
        elif self.overrides():
            given = ", ".join(f"{name}={value}" for name, value in self.overrides().items())
            raise ValueError(
                f"ModelConfig: {given} cannot change {self.source!r}; edit its config.json instead"
            )

    @property
    def hugging_face(self) -> Path | None:
        """The path behind "hf:", or None for our own GPT."""
        if not self.source.startswith(HUGGING_FACE):
            return None
        return Path(self.source.removeprefix(HUGGING_FACE)).expanduser()

    def gpt(self) -> GPTConfig:
        """The shape of our own GPT."""
        if self.source not in SIZES:
            names = ", ".join(map(repr, SIZES))
            raise ValueError(
                f"ModelConfig.source is {self.source!r}; expected one of {names}, or 'hf:' and a path"
            )
        return replace(SIZES[self.source], **self.overrides())

    def overrides(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("layers", "width", "heads", "context")}
        values |= {"vocab_size": self.vocab_size, "tied": self.tied}
        return {name: value for name, value in values.items() if value is not None}


class Shape(NamedTuple):
    """What the trainer must know of a model, whoever wrote it."""

    layers: int
    width: int
    vocab_size: int
    context: int | None
    """The longest sequence; None where there is no limit."""


class HuggingFaceLM(nn.Module):
    """A causal LM of `transformers` as a function from tokens to logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]


def build_model(config: ModelConfig, seed: int, device: torch.device | str = "cpu") -> nn.Module:
    """The whole model on one device, in fp32, the same on every rank. On "meta" it has shapes and no weights.

    >>> parameter_count(build_model(ModelConfig("125M"), seed=0, device="meta"))
    123587328
    """
    if config.hugging_face is None:
        with torch.device(device):
            return GPT(config.gpt(), seed)
    return HuggingFaceLM(_build_hugging_face(config.hugging_face, seed, torch.device(device)))


def _build_hugging_face(path: Path, seed: int, device: torch.device) -> nn.Module:
    if importlib.util.find_spec("transformers") is None:
        raise ModuleNotFoundError(
            f"'hf:{path}' needs transformers; install it with: pip install 'zeropp[hf]'"
        )
    if not (path.is_file() or (path / "config.json").is_file()):
        raise ValueError(f"'hf:{path}': expected a config.json or a local folder that has one")
    try:
        return _load_hugging_face(path, seed, device)
    except Exception as error:  # of files that may hold anything
        said, _, _ = str(error).strip().partition("\n")
        raise ValueError(f"'hf:{path}' cannot be loaded: {type(error).__name__}: {said}") from error


def _load_hugging_face(path: Path, seed: int, device: torch.device) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}  # None would ask on stdin
    if path.is_dir() and any(path.glob("*.safetensors")) and device.type != "meta":
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, use_safetensors=True, **local
        )
        return model.to(device)
    hf_config = AutoConfig.from_pretrained(path, **local)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of any model: the members of the `ModuleList` that holds most of its parameters.

    Lists inside blocks (experts, say) hold less than the list of blocks, so they are never taken for it.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = max(lists, key=parameter_count, default=None)
    if blocks is None or parameter_count(blocks) == 0:
        raise ValueError(
            f"{type(model).__name__} has no ModuleList with parameters, so its blocks cannot be found; "
            "shard it yourself with fully_shard"
        )
    return list(blocks)


def shape_of(model: nn.Module) -> Shape:
    """The shape of a model that `build_model` made, sharded or not."""
    if isinstance(model, GPT):
        return Shape(model.config.layers, model.config.width, model.config.vocab_size, model.config.context)
    assert isinstance(model, HuggingFaceLM)
    config = model.model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    return Shape(len(blocks_of(model)), config.hidden_size, config.vocab_size, context)


def check_fits(model: nn.Module, *, sequence: int, vocab_size: int) -> None:
    """Refuse sequences longer than the model's context, and data with token ids (below `vocab_size`) that
    it has no embedding for: on a GPU the latter is an assertion inside a kernel, long after the start."""
    shape = shape_of(model)
    if shape.context is not None and sequence > shape.context:
        raise ValueError(
            f"the sequence is {sequence} tokens, the model's context {shape.context}; "
            "shorten the sequence or give the model a longer context"
        )
    if vocab_size > shape.vocab_size:
        raise ValueError(
            f"the data has token ids up to {vocab_size - 1}, the model's vocabulary is {shape.vocab_size}; "
            f"set the model's vocab_size to at least {vocab_size} or use data made with its tokenizer"
        )


def parameter_count(model: nn.Module) -> int:
    """Parameters of the whole model, also where this rank holds a shard; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(model: nn.Module, sequence: int) -> float:
    """Floating-point operations of forward and backward for one token, as model FLOPs utilisation counts
    them.

    As in PaLM (arXiv 2204.02311, appendix B): 6 per parameter that a matrix product uses, and 12 * layers *
    width * sequence for attention, without a discount for its mask. Recomputation does not count. Experts
    that a token does not visit do, so the figure is too high for mixtures of experts.
    """
    shape = shape_of(model)
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    used = {id(p): p.numel() for m in model.modules() if m not in embeddings for p in m.parameters(False)}
    return 6.0 * sum(used.values()) + 12.0 * shape.layers * shape.width * sequence
