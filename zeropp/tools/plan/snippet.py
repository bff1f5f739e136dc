"""Code of a strategy for a training script."""

from __future__ import annotations

from dataclasses import fields

from ... import Config
from ..strategies import PRESETS, Strategy, preset_code


def snippet(strategy: Strategy) -> str:
    """Return the code of a strategy: where the model is sharded, and before each micro-batch.

    >>> from ..strategies import find_strategy
    >>> snippet(find_strategy("default"))
    'zpp = zeropp.apply(model, zeropp.Config()), and before each micro-batch \
zpp.set_requires_cross_node_sync(is_last)'
    >>> snippet(find_strategy("fsdp2"))
    'fully_shard without changes'
    """
    parts = []
    if strategy.is_hsdp:
        parts.append(
            "fully_shard(..., mesh=init_device_mesh(device, (nodes, ranks_per_node)), "
            "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))"
        )
    if strategy.reshard_in_node:
        parts.append("fully_shard(..., reshard_after_forward=ranks_per_node)")
    if strategy.config is not None:
        parts.append(f"zpp = zeropp.apply(model, zeropp.{config_code(strategy.config)})")
    switch = {
        "across": "zpp.set_requires_cross_node_sync(is_last)",
        "gradients": "model.set_requires_gradient_sync(is_last)",
        "replicas": "model.set_requires_all_reduce(is_last)",
    }.get(strategy.sync)
    if switch is not None:
        parts.append(f"before each micro-batch {switch}")
    return ", and ".join(parts) or "fully_shard without changes"


def config_code(config: Config) -> str:
    """Return Python code for a Config: a preset, or the arguments that differ from the default.

    >>> config_code(Config.four_bit()), config_code(Config(weights="bf16"))
    ('Config.four_bit()', "Config(weights='bf16')")
    """
    for name, preset in PRESETS.items():
        if config == preset():
            return preset_code(name)
    given = {field.name: getattr(config, field.name) for field in fields(Config)}
    changed = [f"{name}={value!r}" for name, value in given.items() if value != getattr(Config(), name)]
    return f"Config({', '.join(changed)})"
