"""`Config`, which selects what is sent and in which encoding, and its presets. Frozen and validated."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

logger = logging.getLogger("zeropp")

CodecName = Literal["none", "bf16", "int8", "int4"]
WeightsName = Literal["none", "bf16", "int8", "int4", "delta-int4"]
InNodeName = Literal["bf16", "int8"]
PendingName = Literal["fp32", "bf16"]
Rounding = Literal["nearest", "stochastic"]
Route = Literal["two-hop", "flat"]

CHOICES: dict[str, tuple[str, ...]] = {
    "weights": get_args(WeightsName),
    "delta_in_node": get_args(InNodeName),
    "gradients_in_node": get_args(CodecName),
    "gradients_across": get_args(CodecName),
    "gradients_pending": get_args(PendingName),
    "rounding": get_args(Rounding),
    "route": get_args(Route),
}
INTEGERS = ("int8", "int4")
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 32, 4096
MIN_ROTATED_BLOCK_SIZE = 64
MAX_CHUNKS = 16


@dataclass(frozen=True)
class Config:
    """Options of zeropp's communication. The defaults are the recommended ones.

    Examples:
        >>> Config(weights="int3")
        Traceback (most recent call last):
        ...
        ValueError: Config.weights is 'int3'; expected one of 'none', 'bf16', 'int8', 'int4', 'delta-int4'
    """

    weights: WeightsName = "int8"
    """Codec of the weights on the wire (qwZ). "none" sends them unchanged, "bf16" as 16-bit floats, "int8"
    and "int4" as block-quantized integers. Direct "int4" weights are known to ruin training; they exist for
    measurements. "delta-int4" sends the difference since the last gather across nodes, as int4. It needs the
    node shard, which then has 16 bits: see comm/delta_weights.py."""

    secondary: bool = True
    """Keep the node shard (hpZ): while the weights are unchanged, a gather stays inside the node. Costs
    (one encoded model) / (ranks per node) of memory on every rank. Needs route="two-hop"."""

    delta_in_node: InNodeName = "int8"
    """Codec of the weights on the hop inside the node, with weights="delta-int4"."""

    refresh_every: int = 0
    """Number of differences between two full sends of the weights in 16 bits, with weights="delta-int4". 0:
    full sends only at the start, after `load_state_dict` and after `invalidate()`."""

    gradients_in_node: CodecName = "int8"
    """Codec of the gradients on the hop inside the node (qgZ, first hop)."""

    gradients_across: CodecName = "int4"
    """Codec of the gradients on the hop between nodes (qgZ, second hop). "none" sends the fp32 sums."""

    gradients_pending: PendingName = "fp32"
    """Dtype of gradients that wait inside the node for cross-node sync
    (`ZeroPP.set_requires_cross_node_sync`). "fp32" costs (4 bytes per parameter) / (ranks per node) of memory
    on every rank. "bf16" costs half of that, and one stochastic rounding in each micro-batch, which is exact
    in the mean: see quant/random_bf16.py. Sums are in fp32 either way. "bf16" needs route="two-hop"."""

    rotate: bool | Literal["auto"] = "auto"
    """Rotate gradients (a Hadamard transform of every 64 elements) before they are quantized, and rotate them
    back after the last sum. The rotation spreads outliers: see quant/rotation.py. A parameter whose rows
    (slices of dimension 0) are no multiple of 64 elements is not rotated: see comm/chunks.py. True needs an
    integer codec of gradients and block_size >= 64. "auto" is True if both hold, as in the default, and False
    otherwise: see `rotates`."""

    rounding: Rounding = "nearest"
    """Rounding of gradients to integers. "stochastic" is exact in the mean and has about 1.7 times the
    error."""

    error_feedback: bool = False
    """Add the quantization error of the hop between nodes to the gradients of the next step. Costs (1 byte
    per parameter) / (ranks per node) of memory on every rank. `ZeroPP.state_dict` saves the errors. See
    comm/error_feedback.py. Needs an integer codec of gradients_across, and route="two-hop"."""

    seed: int = 0
    """Seed of stochastic rounding (rounding="stochastic", gradients_pending="bf16"). The noise also depends
    on the rank's position in its shard group, the hop, the step and the element's position in its
    parameter."""

    route: Route = "two-hop"
    """Hops of every collective. "two-hop": one hop between ranks of equal position on all nodes, one inside
    the node. "flat": one hop over the whole group, as in FSDP2's own collectives. On a flat route, gradients
    as "none" use the backend's own reduce-scatter. Gradients as "bf16" use the ring of NCCL, with NCCL's
    sums, rounded at each hop (comm/bf16_ring.py). "int8" and "int4" are sent directly to each owner, in an
    all-to-all, because a ring would quantize them at each hop. Rows that are sent directly cross nodes up to
    ranks-per-node times as often as in a ring, so integers should use two hops."""

    block_size: int = 128
    """Elements that share one bf16 scale in "int8" and "int4": a power of two from 32 to 4096. Smaller blocks
    are more exact and send more scales: 16 / block_size bits per element."""

    chunks: int | Literal["auto"] = "auto"
    """Chunks of a large collective (1 to 16): one chunk is encoded while another is on the wire. A chunk has
    at least 64 Ki elements per rank. Changes no value. "auto" is 2; on two hops of gloo, chunks then have at
    least 1 Mi elements, because each chunk costs messages and Python: see comm/chunks.py."""

    overlap: bool = True
    """Send while the training thread computes, on a CPU: see cpu/comm_threads.py. On devices with streams,
    FSDP2 overlaps them already, and this option has no effect. Changes no value. False is for debugging."""

    node_size: int | Literal["auto"] = "auto"
    """Ranks per node, in order of global rank: rank r is on node r // node_size. "auto" uses
    LOCAL_WORLD_SIZE (set by torchrun) if it is consistent, and groups ranks by host name otherwise."""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        for name in ("secondary", "error_feedback", "overlap"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Config.{name} is {getattr(self, name)!r}; expected True or False")
        if not (isinstance(self.rotate, bool) or self.rotate == "auto"):
            raise ValueError(f"Config.rotate is {self.rotate!r}; expected True, False or 'auto'")
        if not _is_int(self.block_size) or not (
            MIN_BLOCK_SIZE <= self.block_size <= MAX_BLOCK_SIZE and self.block_size.bit_count() == 1
        ):
            raise ValueError(
                f"Config.block_size is {self.block_size!r}; expected a power of two from {MIN_BLOCK_SIZE} "
                f"to {MAX_BLOCK_SIZE}"
            )
        if self.chunks != "auto" and not (_is_int(self.chunks) and 1 <= self.chunks <= MAX_CHUNKS):
            raise ValueError(
                f"Config.chunks is {self.chunks!r}; expected a number from 1 to {MAX_CHUNKS}, or 'auto'"
            )
        if self.node_size != "auto" and not (_is_int(self.node_size) and self.node_size >= 1):
            raise ValueError(
                f"Config.node_size is {self.node_size!r}; expected a positive number of ranks, or 'auto'"
            )
        if not _is_int(self.refresh_every) or self.refresh_every < 0:
            raise ValueError(
                f"Config.refresh_every is {self.refresh_every!r}; expected a number of differences, or 0 for "
                "never"
            )
        if not _is_int(self.seed) or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"Config.seed is {self.seed!r}; expected an integer from 0 to 2^64 - 1")
        self._check_together()

    def _check_together(self) -> None:
        """Raise if options contradict each other. An option without effect is an error, too."""
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
        if self.weights == "delta-int4" and not self.secondary:
            raise ValueError(
                "Config.weights is 'delta-int4' with secondary=False; differences are taken from the node "
                "shard: use secondary=True, or weights='int8'"
            )
        if self.weights != "delta-int4" and (self.delta_in_node != "int8" or self.refresh_every):
            raise ValueError(
                f"Config.delta_in_node is {self.delta_in_node!r} and refresh_every is {self.refresh_every} "
                f"with weights={self.weights!r}; both are about differences: use weights='delta-int4'"
            )
        if (self.rotate is True or self.rounding == "stochastic") and not self._has_integer_gradients:
            raise ValueError(
                f"Config.rotate is {self.rotate} and rounding is {self.rounding!r} with gradients sent as "
                f"{self.gradients_in_node!r} and {self.gradients_across!r}; both are about integers: use "
                "'int8' or 'int4'"
            )
        if self.seed and self.rounding != "stochastic" and self.gradients_pending != "bf16":
            raise ValueError(
                f"Config.seed is {self.seed} with rounding={self.rounding!r}, which has no noise; use "
                "rounding='stochastic', or seed=0"
            )
        if self.gradients_pending != "fp32" and self.route == "flat":
            raise ValueError(
                f"Config.gradients_pending is {self.gradients_pending!r} with route='flat', on which no "
                "gradients wait inside the node; use route='two-hop', or gradients_pending='fp32'"
            )
        if self.rotate is True and self.block_size < MIN_ROTATED_BLOCK_SIZE:
            raise ValueError(
                f"Config.block_size is {self.block_size} with rotate=True; expected "
                f"{MIN_ROTATED_BLOCK_SIZE} or more, the elements that are rotated together"
            )
        if self.error_feedback and (self.gradients_across not in INTEGERS or self.route == "flat"):
            raise ValueError(
                f"Config.error_feedback is True with gradients_across={self.gradients_across!r} and "
                f"route={self.route!r}; it is about what the integers of the hop between nodes round off: "
                "use 'int8' or 'int4', and route='two-hop'"
            )

    @property
    def rotates(self) -> bool:
        """Whether gradients are rotated before they are quantized: `rotate`, with "auto" resolved.

        Examples:
            >>> Config().rotates, Config(gradients_in_node="bf16", gradients_across="bf16").rotates
            (True, False)
        """
        if self.rotate == "auto":
            return self._has_integer_gradients and self.block_size >= MIN_ROTATED_BLOCK_SIZE
        return self.rotate

    @property
    def _has_integer_gradients(self) -> bool:
        return self.gradients_in_node in INTEGERS or self.gradients_across in INTEGERS

    @classmethod
    def paper(cls, **changes: Any) -> Config:
        """Return ZeRO++ as published: int8 weights, node shard, int4 gradients on both hops, not rotated."""
        paper = cls(gradients_in_node="int4", gradients_across="int4", rotate=False)
        return replace(paper, **changes)

    @classmethod
    def four_bit(cls, **changes: Any) -> Config:
        """Return four bits between nodes for weights, too, as differences; gradients have error feedback."""
        return replace(cls(weights="delta-int4", error_feedback=True), **changes)

    @classmethod
    def off(cls, **changes: Any) -> Config:
        """Return plain FSDP2, bit for bit, whose traffic the ledger counts. For comparisons: options that
        `changes` do not name stay off."""
        plain = cls(
            weights="none",
            secondary=False,
            gradients_in_node="none",
            gradients_across="none",
            rotate=False,
            route="flat",
        )
        return replace(plain, **changes)

    @classmethod
    def wire16(cls, **changes: Any) -> Config:
        """Return FSDP2 with 16-bit communication, as NCCL does it: the honest baseline.

        Weights are gathered as bf16. Gradients are reduced as bf16 in a ring that rounds at each hop: see
        comm/bf16_ring.py. With route="two-hop" they take zeropp's two hops, with sums in fp32.
        """
        bf16 = {"weights": "bf16", "gradients_in_node": "bf16", "gradients_across": "bf16"}
        return cls.off(**{**bf16, **changes})

    @classmethod
    def from_deepspeed(cls, source: Mapping[str, Any] | str | Path) -> Config:
        """Translate the ZeRO++ keys of a DeepSpeed configuration (a dict or the path of a JSON file).

        Reads `zero_quantized_weights`, `zero_hpz_partition_size` and `zero_quantized_gradients` in
        `zero_optimization`. Logs a warning that names every key without a translation.

        Examples:
            >>> zero = {"stage": 3, "zero_quantized_weights": True}
            >>> Config.from_deepspeed({"zero_optimization": zero}).weights
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
        # Plain ZeRO-3 stays plain FSDP2, on one hop.
        if not (quantized_weights or quantized_gradients or partition > 1):
            return cls.off()
        gradients: CodecName = "int4" if quantized_gradients else "none"
        return cls(
            weights="int8" if quantized_weights else "none",
            secondary=partition > 1,
            gradients_in_node=gradients,
            gradients_across=gradients,
            rotate=False,
            node_size=partition if partition > 1 else "auto",
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)  # bool is a subclass of int


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"Config.{name} is {value!r}; expected one of {expected}")


def _deepspeed_flag(zero: Mapping[str, Any], key: str) -> bool:
    value = zero.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"zero_optimization.{key} is {value!r}; expected true or false")
    return value
