"""What to send, and how: one frozen, validated `Config` and its presets."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

logger = logging.getLogger("zeropp")

CodecName = Literal["none", "bf16", "int8", "int4"]
Route = Literal["two-hop", "flat"]

CODEC_NAMES: tuple[str, ...] = get_args(CodecName)
ROUTES: tuple[str, ...] = get_args(Route)
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 32, 4096


@dataclass(frozen=True)
class Config:
    """How zeropp replaces FSDP2's communication. The default is what we recommend.

    >>> Config()
    Config(weights='int8', secondary=True, gradients_in_node='int8', gradients_across='int4', \
route='two-hop', block_size=128, node_size='auto')
    >>> Config(weights="int3")
    Traceback (most recent call last):
    ...
    ValueError: Config.weights is 'int3'; expected one of 'none', 'bf16', 'int8', 'int4'
    """

    weights: CodecName = "int8"
    """Codec of the weights on the wire (qwZ). "none" sends them as they are, "bf16" as 16-bit floats,
    "int8" and "int4" as block-quantized integers. Direct "int4" weights are known to ruin training; they
    are here to be measured."""

    secondary: bool = True
    """Keep the node shard (hpZ): while the weights are unchanged, a gather stays inside the node. Costs
    one encoded model / ranks per node in memory on every rank. Needs route="two-hop"."""

    gradients_in_node: CodecName = "int8"
    """Codec of the gradients on the hop inside the node (qgZ, first hop)."""

    gradients_across: CodecName = "int4"
    """Codec of the gradients on the hop between nodes (qgZ, second hop). "none" sends the fp32 sums."""

    route: Route = "two-hop"
    """"two-hop": one hop between ranks of equal position on all nodes, one inside the node. "flat": one hop
    over the whole group, as FSDP2's own collectives go; gradients with codec "none" then use the backend's
    own reduce-scatter."""

    block_size: int = 128
    """Elements that share one bf16 scale in "int8" and "int4": a power of two from 32 to 4096. Smaller is
    more exact and sends more scales: 16 / block_size bits per element."""

    node_size: int | Literal["auto"] = "auto"
    """Ranks per node, in order of global rank: rank r is on node r // node_size. "auto" takes
    LOCAL_WORLD_SIZE (torchrun sets it), or else groups ranks by host name."""

    def __post_init__(self) -> None:
        for name in ("weights", "gradients_in_node", "gradients_across"):
            _check_choice(name, getattr(self, name), CODEC_NAMES)
        _check_choice("route", self.route, ROUTES)
        if not isinstance(self.secondary, bool):
            raise ValueError(f"Config.secondary is {self.secondary!r}; expected True or False")
        if self.secondary and self.route == "flat":
            raise ValueError(
                "Config.secondary is True with route='flat'; the node shard is what the first of two hops "
                "leaves behind: use route='two-hop', or secondary=False"
            )
        if self.route == "flat" and self.gradients_in_node != self.gradients_across:
            raise ValueError(
                f"Config.gradients_in_node is {self.gradients_in_node!r} and gradients_across is "
                f"{self.gradients_across!r} with route='flat'; a flat route has one hop: give both one codec"
            )
        if not _is_int(self.block_size) or not (
            MIN_BLOCK_SIZE <= self.block_size <= MAX_BLOCK_SIZE and self.block_size.bit_count() == 1
        ):
            raise ValueError(
                f"Config.block_size is {self.block_size!r}; expected a power of two from {MIN_BLOCK_SIZE} "
                f"to {MAX_BLOCK_SIZE}"
            )
        if self.node_size != "auto" and not (_is_int(self.node_size) and self.node_size >= 1):
            raise ValueError(
                f"Config.node_size is {self.node_size!r}; expected a positive number of ranks, or 'auto'"
            )

    @classmethod
    def paper(cls, **changes: Any) -> Config:
        """ZeRO++ as published: int8 weights, node shard, int4 gradients on both hops."""
        return replace(cls(gradients_in_node="int4", gradients_across="int4"), **changes)

    @classmethod
    def off(cls, **changes: Any) -> Config:
        """Plain FSDP2, bit for bit, with the ledger counting. For comparisons."""
        plain = cls(
            weights="none", secondary=False, gradients_in_node="none", gradients_across="none", route="flat"
        )
        return replace(plain, **changes)

    @classmethod
    def wire16(cls, **changes: Any) -> Config:
        """FSDP2 with 16-bit communication: the honest baseline. Sums are still in fp32."""
        bf16 = {"weights": "bf16", "gradients_in_node": "bf16", "gradients_across": "bf16"}
        return cls.off(**{**bf16, **changes})

    @classmethod
    def from_deepspeed(cls, source: Mapping[str, Any] | str | Path) -> Config:
        """Translate the ZeRO++ keys of a DeepSpeed configuration (a dict or the path of a JSON file).

        Reads `zero_quantized_weights`, `zero_hpz_partition_size` and `zero_quantized_gradients` below
        `zero_optimization`; logs a warning that names every key it does not translate.

        >>> Config.from_deepspeed({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}).weights
        'int8'
        """
        given: Any = json.loads(Path(source).read_text()) if isinstance(source, (str, Path)) else source
        zero = given.get("zero_optimization") if isinstance(given, Mapping) else None
        if not isinstance(zero, Mapping):
            raise ValueError(
                f"the DeepSpeed configuration has zero_optimization = {zero!r}; expected an object with "
                "keys such as 'stage' and 'zero_quantized_weights'"
            )
        stage = zero.get("stage", 3)
        if stage != 3:
            raise ValueError(
                f"zero_optimization.stage is {stage!r}; ZeRO++ and FSDP2's fully_shard are stage 3: "
                "set it to 3, or do not use zeropp for this run"
            )
        quantized_weights = _deepspeed_flag(zero, "zero_quantized_weights")
        quantized_gradients = _deepspeed_flag(zero, "zero_quantized_gradients")
        partition = zero.get("zero_hpz_partition_size", 1)
        if not _is_int(partition) or partition < 1:
            raise ValueError(
                f"zero_optimization.zero_hpz_partition_size is {partition!r}; expected the number of ranks "
                "that share a secondary copy (1: off)"
            )
        translated = {
            "stage",
            "zero_quantized_weights",
            "zero_hpz_partition_size",
            "zero_quantized_gradients",
        }
        ignored = [f"zero_optimization.{key}" for key in zero if key not in translated]
        ignored += [key for key in given if key != "zero_optimization"]
        if ignored:
            logger.warning("Config.from_deepspeed does not translate: %s", ", ".join(sorted(ignored)))
        if not (quantized_weights or quantized_gradients or partition > 1):
            return cls.off()
        gradients: CodecName = "int4" if quantized_gradients else "none"
        return cls(
            weights="int8" if quantized_weights else "none",
            secondary=partition > 1,
            gradients_in_node=gradients,
            gradients_across=gradients,
            node_size=partition if partition > 1 else "auto",
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"Config.{name} is {value!r}; expected one of {expected}")


def _deepspeed_flag(zero: Mapping[str, Any], key: str) -> bool:
    value = zero.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"zero_optimization.{key} is {value!r}; expected true or false")
    return value
