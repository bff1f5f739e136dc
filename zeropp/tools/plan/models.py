"""Models to plan for: built-in sizes, Hugging Face configs, and functions of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn

from ..models.gpt import SIZES
from ..models.loading import HUGGING_FACE, ModelConfig, blocks_of, build_model

SIMPLE = (bool, int, float, str, tuple, type(None))
POSITION_NAMES = ("idx", "index", "layer_id", "layer_number")


class PlanError(ValueError):
    """A request that cannot be planned. The message has the reason and the way out."""


@dataclass(frozen=True)
class Model:
    """A model to plan for."""

    name: str
    build: Callable[[], nn.Module]
    """Builds the whole model, on the current device and in the current fake mode."""
    is_user_function: bool = False
    """Whether `build` calls a function of the user."""


def resolve(spec: str) -> Model:
    """Return the model of a specification: a size, `hf:PATH`, or `module:function`.

    >>> resolve("18B").name
    '18B'
    >>> resolve("7B")
    Traceback (most recent call last):
    ...
    zeropp.tools.plan.models.PlanError: model is '7B'; expected one of tiny, 125M, 350M, 1.3B, 18B, 'hf:' \
and the path of a Hugging Face config, or 'module:function' of a function that returns your model
    """
    if spec in SIZES:
        return Model(spec, lambda: build_model(ModelConfig(spec), seed=0))
    if spec.startswith(HUGGING_FACE):
        return Model(spec, lambda: _hugging_face(spec))
    if ":" in spec:
        return _from_function(spec)
    raise PlanError(
        f"model is {spec!r}; expected one of {', '.join(SIZES)}, 'hf:' and the path of a Hugging Face "
        "config, or 'module:function' of a function that returns your model"
    )


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the name of the list of layers, and the list.

    >>> model = nn.Module()
    >>> model.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    >>> find_blocks(model)[0]
    'layers'
    """
    try:
        blocks = blocks_of(model)
    except ValueError as error:
        raise PlanError(
            f"the layers of {type(model).__name__} were not found; put them into an nn.ModuleList, as in "
            "self.layers = nn.ModuleList(...)"
        ) from error
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and list(module) == blocks:
            return name, module
    raise AssertionError("blocks_of returns the members of a list")


def are_alike(blocks: nn.ModuleList) -> bool:
    """Return whether all layers have the same modules, settings, and shapes of parameters.

    >>> are_alike(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    True
    >>> are_alike(nn.ModuleList([nn.Dropout(0.1), nn.Dropout(0.2)]))
    False
    """
    first, *others = [_description(block) for block in blocks]
    return all(other == first for other in others)


def loss_of(model: nn.Module, batch: int, sequence: int) -> Tensor:
    """Call the model with a batch of tokens and return its loss.

    The signature of the model's `forward` selects the call: `forward(input_ids=, labels=)` as in Hugging
    Face, `forward(tokens, targets)`, or `forward(tokens)`. The model returns its loss, an object with a
    `loss`, or logits [batch, sequence, vocabulary].
    """
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    parameters = inspect.signature(model.forward).parameters
    if {"input_ids", "labels"} <= set(parameters):
        out = model(input_ids=tokens, labels=tokens)
    else:
        out = model(tokens, tokens) if _takes_targets(list(parameters.values())) else model(tokens)
    out = getattr(out, "loss", out)
    if isinstance(out, Tensor) and out.dim() == 0:
        return out
    if isinstance(out, Tensor) and out.shape[:-1] == tokens.shape:
        return nn.functional.cross_entropy(out.flatten(0, 1).float(), tokens.flatten())
    returned = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
    raise PlanError(
        f"{type(model).__name__} returned {returned}; expected its loss, an object with a .loss, or logits "
        f"[batch, sequence, vocabulary] = [{batch}, {sequence}, ...]"
    )


def _takes_targets(parameters: list[inspect.Parameter]) -> bool:
    if len(parameters) < 2:
        return False
    second = parameters[1]
    has_no_default = second.default is second.empty and second.kind in (
        second.POSITIONAL_ONLY,
        second.POSITIONAL_OR_KEYWORD,
    )
    return has_no_default or any(word in second.name for word in ("target", "label"))


def _hugging_face(spec: str) -> nn.Module:
    """Build the model from its config.json, even for a checkpoint: a dry run needs no weights."""
    config = ModelConfig(spec)
    if config.hugging_face is not None and config.hugging_face.is_dir():
        config = ModelConfig(f"{spec}/config.json")
    try:
        return build_model(config, seed=0)
    except (ImportError, OSError, ValueError) as error:
        raise PlanError(f"model is {spec!r}: {error}") from error


def _from_function(spec: str) -> Model:
    module_name, _, function_name = spec.partition(":")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise PlanError(
            f"model is {spec!r}, but the module {module_name!r} cannot be imported ({error}); put it on "
            "PYTHONPATH or into the current directory"
        ) from error
    except Exception as error:
        raise user_error(spec, error) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise PlanError(
            f"model is {spec!r}, but {module_name} has no function {function_name!r}; name one that returns "
            "your model"
        )

    def build() -> nn.Module:
        model = function()
        if not isinstance(model, nn.Module):
            raise PlanError(f"{spec} returned a {type(model).__name__}; expected a torch.nn.Module")
        return model

    return Model(spec, build, is_user_function=True)


def user_error(spec: str, error: Exception) -> Exception:
    """Return a PlanError with the user's line of code, or the error itself if no such line took part."""
    others = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent), "<")
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    line = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError):
        line = f"{error.filename}, line {error.lineno}"
    if isinstance(error, PlanError) or not line:
        return error
    message, _, _ = str(error).strip().partition("\n")
    return PlanError(
        f"model is {spec!r}, and it raised {type(error).__name__}: {message} ({line}); correct this line"
    )


def _description(block: nn.Module) -> list[Any]:
    """Return modules, settings and parameter shapes of a layer, without its position in the list."""
    return [
        (
            name,
            type(module),
            {key: value for key, value in vars(module).items() if _is_setting(key, value)},
            [(key, p.shape, p.dtype, p.requires_grad) for key, p in module.named_parameters(recurse=False)],
        )
        for name, module in block.named_modules()
    ]


def _is_setting(key: str, value: object) -> bool:
    return isinstance(value, SIMPLE) and not key.startswith("_") and not key.endswith(POSITION_NAMES)
