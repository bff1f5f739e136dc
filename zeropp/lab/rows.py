"""The rows of the benchmark: what a user would otherwise pick, and each part of ours."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from ..config import Config

Sync = Literal["every", "gradients", "across", "replicas"]
Engine = Literal["fsdp2", "compute", "deepspeed"]


@dataclass(frozen=True)
class Row:
    """One way to train the same model."""

    name: str
    title: str
    config: Config | None = None
    """What `zeropp.apply` gets; None: it is not called."""
    engine: Engine = "fsdp2"
    sync: Sync = "every"
    """What happens once per optimizer step instead of in every micro-batch. "gradients": FSDP2's
    `set_requires_gradient_sync`; "across": `set_requires_cross_node_sync`; "replicas": HSDP's all-reduce
    (`set_requires_all_reduce`)."""
    is_hsdp: bool = False
    """Sharded inside the node, replicated across nodes, gradients reduced as bf16. With one rank a node:
    replicated only."""
    reshard_in_node: bool = False
    """`reshard_after_forward=` the ranks of a node."""
    deepspeed_hpz: bool = False
    is_ours: bool = False

    def why_not(self, nodes: int, ranks_per_node: int) -> str | None:
        """Why the row makes no sense on such a cluster, or cannot be run here."""
        if self.engine == "deepspeed" and find_spec("deepspeed") is None:
            return "DeepSpeed is not installed: pip install 'zeropp[deepspeed]'"
        if (self.reshard_in_node or self.deepspeed_hpz) and ranks_per_node == 1:
            return "needs more than one rank per node"
        return None


BASELINE = "wire16"
DEFAULT = "default"
COMPUTE = Row("compute", "compute only (nothing is sent)", engine="compute")
"""FSDP2 with comms that send nothing: the first part of every row's limit."""

_two_hop_16bit = Config.wire16(route="two-hop")
ROWS: tuple[Row, ...] = (
    Row("fsdp2", "FSDP2 as it comes (fp32)"),
    Row(BASELINE, "FSDP2, 16-bit wire: the baseline", Config.wire16()),
    Row("wire16-accumulate", "16-bit wire, set_requires_gradient_sync", Config.wire16(), sync="gradients"),
    Row("wire16-two-hop", "16-bit wire, two-hop route", _two_hop_16bit),
    Row("wire16-reshard", "16-bit wire, reshard_after_forward=int", Config.wire16(), reshard_in_node=True),
    Row("hsdp", "HSDP, gradients as bf16", is_hsdp=True, sync="replicas"),
    Row("qwz", "qwZ alone", Config.wire16(route="two-hop", weights="int8"), is_ours=True),
    Row("hpz", "hpZ alone", Config.wire16(route="two-hop", secondary=True), is_ours=True),
    Row(
        "qgz",
        "qgZ alone",
        Config.wire16(route="two-hop", gradients_in_node="int4", gradients_across="int4"),
        is_ours=True,
    ),
    Row("paper", "the paper's set", Config.paper(), is_ours=True),
    Row(DEFAULT, "zeropp's default", Config(), sync="across", is_ours=True),
    Row("unrotated", "zeropp's default, rotate=False", Config(rotate=False), sync="across", is_ours=True),
    Row("four-bit", "zeropp's four bits", Config.four_bit(), sync="across", is_ours=True),
    Row("deepspeed", "DeepSpeed ZeRO-3 (fp32)", engine="deepspeed"),
    Row("deepspeed-hpz", "DeepSpeed ZeRO-3 + hpZ (fp32)", engine="deepspeed", deepspeed_hpz=True),
)
NOT_RUN = {
    "DeepSpeed qwZ, qgZ": "cannot run on CPU: their kernels need a CUDA build (deepspeed.ops.quantizer)",
}
"""What a reader would look for, and why it is not measured."""


def find_row(name: str) -> Row:
    known = {row.name: row for row in (*ROWS, COMPUTE)}
    if name not in known:
        raise ValueError(f"row is {name!r}; expected one of {', '.join(row.name for row in ROWS)}")
    return known[name]
