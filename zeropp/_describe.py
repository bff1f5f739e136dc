"""Descriptions of units for people: the table of `ZeroPP.summary`, its notes, and warnings about memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from rich.table import Table

from ._footprint import Footprint
from ._unit import CompressedUnit
from .fsdp2.units import Unit
from .quant import QUANTIZABLE_DTYPES

logger = logging.getLogger("zeropp")

NUMBERS = ("parameters", "kept bytes", "will keep", "pending")
"""Columns of `describe` that are numbers."""
UNUSUAL_FOOTPRINT = 4
"""Times the shards of the parameters: as much as parameters, gradients and AdamW's two states in one
dtype."""


def describe(comms: CompressedUnit) -> dict[str, str]:
    """What a unit sends, in words: a row of `ZeroPP.summary`."""
    row = {"unit": comms.unit.label, "parameters": f"{sum(p.numel() for p in comms.unit.params):,}"}
    if comms.pair is None or comms.topology is None:
        why = f"left alone: {comms.left_alone}" if comms.left_alone else "removed"
        empty = dict.fromkeys(
            ("nodes", "weights", "kept bytes", "will keep", "pending", "gradients", "notes"), ""
        )
        return row | empty | {"weights": "FSDP2", "gradients": "FSDP2", "notes": why}
    (weights, gradients), will_keep = comms.pair, comms.will_keep()
    sent = " -> ".join(f"{gradients.codec_names[hop.name]} {hop.name}" for hop in gradients.hops)
    return row | {
        "nodes": comms.topology.describe(),
        "weights": " -> ".join(f"{weights.codec_name(hop)} {hop.name}" for hop in weights.hops),
        "kept bytes": f"{comms.keeps().total:,}",
        "will keep": f"{will_keep.node_shard + will_keep.errors:,}",
        "pending": f"{will_keep.pending:,}",
        "gradients": sent + (", rotated" if comms.config.rotates else ""),
        "notes": "; ".join(remarks(comms)),
    }


def summary_table(units: Sequence[CompressedUnit]) -> Table:
    """One line per unit: see `ZeroPP.summary`."""
    rows = [describe(comms) for comms in units]
    table = Table(title=f"zeropp on {len(rows)} units")
    for column in rows[0]:
        table.add_column(column, justify="right" if column in NUMBERS else "left", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table


def remarks(comms: CompressedUnit) -> list[str]:
    """Notes about a compressed unit: options without effect, and numbers that are sent as they are."""
    return list(_remarks(comms)) if comms.pair is not None else []


def _remarks(comms: CompressedUnit) -> Iterator[str]:
    unit, config, topology = comms.unit, comms.config, comms.topology
    if config.weights != "none" and (why := _why_weights_are_plain(unit)):
        yield f"weights sent as they are: {why}"
    reduced = unit.reduce_dtype()
    encodes_gradients = {config.gradients_in_node, config.gradients_across} != {"none"}
    if encodes_gradients and reduced is not None and reduced not in QUANTIZABLE_DTYPES:
        yield f"gradients sent as they are: dtype {_names({reduced})}"
    if config.weights == "int4":
        yield "int4 weights are known to ruin training"
    if unit.is_hsdp:
        yield "HSDP's all-reduce stays FSDP2's; on a 1-D mesh zeropp compresses all of it"
    if not config.overlap and unit.device.type != "cpu":
        yield "overlap=False has no effect: on this device FSDP2 overlaps by itself"
    if topology is not None and topology.is_one_node:
        if config.secondary:
            yield "one node: no node shard to keep"
        if config.error_feedback:
            yield "one node: no hop between nodes for error feedback"
    if comms.reduces_in_own_groups:
        yield "gradients in process groups of their own"
    if unit.frozen:
        yield unit.frozen


def _why_weights_are_plain(unit: Unit) -> str | None:
    """Why the unit's weights, or some of them, cannot be encoded, or None."""
    if types := unit.gather_extensions():  # already encoded by their own type
        return f"gathered through {' and '.join(sorted(types))}"
    if others := unit.gather_dtypes() - QUANTIZABLE_DTYPES:
        return f"dtype {_names(others)}"
    return None


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def warn_if_unusual(units: Sequence[CompressedUnit], footprint: Footprint) -> None:
    """Warn before memory is allocated that exceeds the training state of a rank."""
    shards = sum(comms.unit.shard_bytes for comms in units)
    if footprint.total > UNUSUAL_FOOTPRINT * shards and dist.get_rank() == 0:
        logger.warning(
            "zeropp: every rank will hold %s bytes (%s), %.0fx its shards of the parameters. summary() lists "
            "them by unit; Config(secondary=False) saves node shards, gradients_pending='bf16' half of "
            "pending gradients, error_feedback=False stored errors",
            *(f"{footprint.total:,}", footprint.describe(), footprint.total / max(1, shards)),
        )
