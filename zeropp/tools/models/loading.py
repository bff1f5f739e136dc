"""Load or build a model, ours or Hugging Face's, with one interface: `model(tokens) -> logits`."""

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
    """The model to train, and how a device runs it.

    >>> ModelConfig("tiny", layers=2).gpt().layers
    2
    >>> ModelConfig("7B")
    Traceback (most recent call last):
    ...
    ValueError: ModelConfig.source is '7B'; expected one of 'tiny', '125M', '350M', '1.3B', '18B', \
or 'hf:' and a path
    """

    source: str = "tiny"
    """A size of our own GPT ("tiny", "125M", "350M", "1.3B", "18B"), or "hf:" and a local path: the folder of
    a Hugging Face causal LM, to train its weights further, or a config.json, to train from random weights."""
    layers: int | None = None
    """Number of blocks; None: that of the size. This option and those up to `tied` are for our own GPT
    only."""
    width: int | None = None
    """Width of the residual stream; None: that of the size."""
    heads: int | None = None
    """Number of attention heads; None: that of the size."""
    context: int | None = None
    """Maximal sequence length; None: that of the size."""
    vocab_size: int | None = None
    """Number of token ids; None: that of the size."""
    tied: bool | None = None
    """Whether embedding and head share one matrix; None: as in the size."""
    precision: Precision = "auto"
    """Precision of matrix products; weights and sums are in fp32. "auto": bf16 on devices with fast bf16,
    else fp32."""
    activation_checkpointing: bool = False
    """Store only the inputs of blocks and recompute their activations in backward."""
    compile: bool = False
    """torch.compile each block."""

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
        """Path after "hf:", or None for our own GPT."""
        if not self.source.startswith(HUGGING_FACE):
            return None
        return Path(self.source.removeprefix(HUGGING_FACE)).expanduser()

    def gpt(self) -> GPTConfig:
        """Return the config of our own GPT."""
        if self.source not in SIZES:
            names = ", ".join(map(repr, SIZES))
            raise ValueError(
                f"ModelConfig.source is {self.source!r}; expected one of {names}, or 'hf:' and a path"
            )
        return replace(SIZES[self.source], **self.overrides())

    def overrides(self) -> dict[str, Any]:
        """Return the fields that differ from those of the size."""
        values = {name: getattr(self, name) for name in ("layers", "width", "heads", "context")}
        values |= {"vocab_size": self.vocab_size, "tied": self.tied}
        return {name: value for name, value in values.items() if value is not None}


class Shape(NamedTuple):
    """Dimensions of a model, ours or Hugging Face's."""

    layers: int
    width: int
    vocab_size: int
    context: int | None
    """Maximal sequence length; None if there is no limit."""


class HuggingFaceLM(nn.Module):
    """A causal LM of `transformers` with our GPT's interface: tokens to logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]


def build_model(config: ModelConfig, seed: int, device: torch.device | str = "cpu") -> nn.Module:
    """Return the unsharded model in fp32, the same on every rank. On "meta" it has shapes but no weights.

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
    except Exception as error:  # invalid files can raise any type
        reason, _, _ = str(error).strip().partition("\n")
        raise ValueError(f"'hf:{path}' cannot be loaded: {type(error).__name__}: {reason}") from error


def _load_hugging_face(path: Path, seed: int, device: torch.device) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    # trust_remote_code=None would prompt on stdin
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
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
    """Return the blocks of a model: the members of the `ModuleList` with the most parameters.

    A list inside a block, such as a list of experts, has fewer parameters than the list of blocks.
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
    """Return the dimensions of a model made by `build_model`, sharded or not."""
    if isinstance(model, GPT):
        return Shape(model.config.layers, model.config.width, model.config.vocab_size, model.config.context)
    assert isinstance(model, HuggingFaceLM)
    config = model.model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    return Shape(len(blocks_of(model)), config.hidden_size, config.vocab_size, context)


def check_fits(model: nn.Module, *, sequence: int, vocab_size: int) -> None:
    """Raise if `sequence` is longer than the model's context, or if `vocab_size` of the data is larger than
    the model's. On a GPU, a token id without an embedding would fail later, as an assertion in a kernel."""
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
    """Return the number of parameters of the whole model, sharded or not. Tied parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(model: nn.Module, sequence: int) -> float:
    """Return the FLOPs of forward and backward per token, as model FLOPs utilisation counts them.

    The formula is PaLM's (arXiv 2204.02311, appendix B): 6 per parameter of a matrix product, plus 12 *
    layers * width * sequence for attention, without a discount for its mask. Recomputation does not count.
    All experts count, so the figure is too high for mixtures of experts.
    """
    shape = shape_of(model)
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    used = {id(p): p.numel() for m in model.modules() if m not in embeddings for p in m.parameters(False)}
    return 6.0 * sum(used.values()) + 12.0 * shape.layers * shape.width * sequence
