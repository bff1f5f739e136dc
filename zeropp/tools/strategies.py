"""Presets, which are the Configs with a name, and strategies: ways to train a model with FSDP2, HSDP,
DeepSpeed or zeropp.

The benchmark measures the strategies and the planner predicts their step times. A `Strategy` sets the codecs,
the sharding of the model, and the communication that happens once per step instead of once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from .. import Config, ZeroPP

PresetName = Literal["default", "four-bit", "paper", "wire16", "fsdp2"]
PRESETS: dict[PresetName, Callable[..., Config]] = {
    "fsdp2": Config.off,
    "wire16": Config.wire16,
    "paper": Config.paper,
    "default": Config,
    "four-bit": Config.four_bit,
}
"""Constructors of the Configs that have a name on command lines, in TOML files and in reports.

Every other list of presets derives from this one. Tables use its order, help texts that of `PresetName`. The
preset wire16 overlaps on a CPU; the strategy of that name, the baseline, does not.
"""


def preset_code(name: PresetName) -> str:
    """Return the Python code of a preset.

    >>> preset_code("default"), preset_code("four-bit")
    ('Config()', 'Config.four_bit()')
    """
    return f"{PRESETS[name].__qualname__}()"


Sync = Literal["every", "gradients", "across", "replicas"]
Engine = Literal["fsdp2", "compute", "deepspeed"]


@dataclass(frozen=True)
class Strategy:
    """One way to train."""

    name: str
    title: str
    config: Config | None = None
    """Config for `zeropp.apply`. None: zeropp is not applied, or `is_auto` is set."""
    is_auto: bool = False
    """Whether `zeropp.apply` gets "auto"."""
    engine: Engine = "fsdp2"
    sync: Sync = "every"
    """Communication that happens once per optimizer step instead of in every micro-batch. "every": none.
    "gradients": all reductions (FSDP2's `set_requires_gradient_sync`). "across": reductions between nodes
    (`set_requires_cross_node_sync`). "replicas": HSDP's all-reduce (`set_requires_all_reduce`)."""
    is_hsdp: bool = False
    """Whether the model is sharded inside the node and replicated across nodes, with gradients reduced in
    bf16. With one rank per node the model is only replicated."""
    reshard_in_node: bool = False
    """Whether `reshard_after_forward` is the number of ranks per node."""
    deepspeed_hpz: bool = False
    """Whether DeepSpeed's hpZ is on: `zero_hpz_partition_size` is the number of ranks per node."""
    is_ours: bool = False
    """Whether it uses a technique of ZeRO++ through zeropp."""

    def why_not(self, nodes: int, ranks_per_node: int) -> str | None:
        """Return why this strategy cannot run on such a cluster, or None if it can."""
        if self.engine == "deepspeed" and find_spec("deepspeed") is None:
            return "DeepSpeed is not installed: pip install 'zeropp[deepspeed]'"
        if (self.reshard_in_node or self.deepspeed_hpz) and ranks_per_node == 1:
            return "needs more than one rank per node"
        return None

    @property
    def overlaps(self) -> bool:
        """Whether communication overlaps compute on a CPU, as zeropp's does. FSDP2's own does not."""
        return self.is_auto or (self.config is not None and self.config.overlap)

    def sharding_options(self, ranks_per_node: int) -> dict[str, Any]:
        """Return the arguments of `fully_shard`. Needs a process group, because it creates HSDP's mesh."""
        options: dict[str, Any] = {}
        if self.is_hsdp:
            shape = (dist.get_world_size() // ranks_per_node, ranks_per_node)
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        if self.reshard_in_node:
            options["reshard_after_forward"] = ranks_per_node
        return options

    def sync_switch(self, model: nn.Module, zpp: ZeroPP | None) -> Callable[[bool], object]:
        """Return a function to call before each micro-batch, with True for the last one of a step."""
        assert isinstance(model, FSDPModule)
        if self.sync == "gradients":
            return model.set_requires_gradient_sync
        if self.sync == "replicas":
            return model.set_requires_all_reduce
        if self.sync == "across" and zpp is not None:
            return zpp.set_requires_cross_node_sync
        return lambda _: None


BASELINE = "wire16"
DEFAULT = "default"
COMPUTE = Strategy("compute", "compute only (nothing is sent)", engine="compute")
"""FSDP2 with comms that send nothing: the compute time in every strategy's limit."""

_two_hop_16bit = Config.wire16(route="two-hop")
STRATEGIES: tuple[Strategy, ...] = (
    Strategy("fsdp2", "FSDP2 as it comes (fp32)"),
    Strategy(BASELINE, "FSDP2, 16-bit wire, serial: the baseline", Config.wire16(overlap=False)),
    Strategy("wire16-overlap", "16-bit wire, overlapped", Config.wire16()),
    Strategy(
        "wire16-accumulate", "16-bit wire, set_requires_gradient_sync", Config.wire16(), sync="gradients"
    ),
    Strategy("wire16-two-hop", "16-bit wire, two-hop route", _two_hop_16bit),
    Strategy(
        "wire16-reshard", "16-bit wire, reshard_after_forward=int", Config.wire16(), reshard_in_node=True
    ),
    Strategy("hsdp", "HSDP, gradients as bf16", is_hsdp=True, sync="replicas"),
    Strategy(
        "hfsdp",
        "HFSDP (as in Megatron-FSDP)",
        Config(weights="bf16", gradients_in_node="bf16", gradients_across="bf16"),
        sync="across",
    ),
    Strategy("qwz", "qwZ alone", Config.wire16(route="two-hop", weights="int8"), is_ours=True),
    Strategy("hpz", "hpZ alone", Config.wire16(route="two-hop", secondary=True), is_ours=True),
    Strategy(
        "qgz",
        "qgZ alone",
        Config.wire16(route="two-hop", gradients_in_node="int4", gradients_across="int4"),
        is_ours=True,
    ),
    Strategy("paper", "the paper's set", Config.paper(), is_ours=True),
    Strategy(DEFAULT, "zeropp's default", Config(), sync="across", is_ours=True),
    Strategy(
        "default-serial", "zeropp's default, serial", Config(overlap=False), sync="across", is_ours=True
    ),
    Strategy(
        "unrotated", "zeropp's default, rotate=False", Config(rotate=False), sync="across", is_ours=True
    ),
    Strategy("four-bit", "zeropp's four bits", Config.four_bit(), sync="across", is_ours=True),
    Strategy("auto", "zeropp's own choice (auto)", is_auto=True, sync="across", is_ours=True),
    Strategy("deepspeed", "DeepSpeed ZeRO-3 (fp32)", engine="deepspeed"),
    Strategy("deepspeed-hpz", "DeepSpeed ZeRO-3 + hpZ (fp32)", engine="deepspeed", deepspeed_hpz=True),
)
"""The lines of the benchmark: the alternatives to zeropp, and zeropp with each of its techniques."""
NOT_RUN = {
    "DeepSpeed qwZ, qgZ": "cannot run on CPU: their kernels need a CUDA build (deepspeed.ops.quantizer)",
}
"""Alternatives that the benchmark does not measure, with the reason."""


def find_strategy(name: str) -> Strategy:
    """Return the strategy with this name.

    >>> find_strategy("hsdp").title
    'HSDP, gradients as bf16'
    """
    known = {strategy.name: strategy for strategy in (*STRATEGIES, COMPUTE)}
    if name not in known:
        expected = ", ".join(strategy.name for strategy in STRATEGIES)
        raise ValueError(f"strategy is {name!r}; expected one of {expected}")
    return known[name]
