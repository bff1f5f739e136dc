"""What each unit sends: by which Config, over which nodes and hops, through which comms, or why zeropp leaves
it alone."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table
from torch.autograd import Variable

from ._footprint import Footprint
from .comm import Alarm, AllGather, Ledger, ReduceScatter, Scratch, Wire
from .config import Config
from .cpu.overlap import Overlap, UnitOverlap, can_overlap
from .fsdp2.units import Unit
from .fsdp2.zero_grad import GradientWatch
from .quant import QUANTIZABLE_DTYPES
from .topology import Hop, Topology

logger = logging.getLogger("zeropp")

NUMBERS = ("parameters", "kept bytes", "will keep", "pending")
"""Columns of `CompressedUnit.describe`."""


class CommPair(NamedTuple):
    """What takes the place of FSDP2's two collectives in one unit."""

    all_gather: AllGather
    """Gathers its weights."""
    reduce_scatter: ReduceScatter
    """Reduces its gradients."""

    def take_over(self, others: CommPair) -> None:
        """Go on with what `others` have kept."""
        self.all_gather.take_over(others.all_gather)
        self.reduce_scatter.take_over(others.reduce_scatter)


@dataclass
class CompressedUnit:
    """What one unit sends and keeps, or why it is left alone."""

    unit: Unit
    config: Config
    topology: Topology | None = None
    pair: CommPair | None = None
    """None: FSDP2's own comms are in place."""
    left_alone: str | None = None
    """Why FSDP2's own comms stay in place, or None."""
    separates_reductions: bool = False
    """Whether gradients have hop groups of their own."""
    notes: list[str] = field(default_factory=list)
    requires_sync: bool = True
    """False: gradients wait, as far as the unit's route allows, for a later backward to go across nodes."""
    instead_of_fsdp2: bool = False
    """Whether the loop had asked FSDP2 for that, which would have sent nothing either."""
    may_hold: bool = True
    """Whether zeropp may make FSDP2 hold the gradients of the whole model, where nothing less can be put off.
    Not while it chooses a Config by itself: they may not fit, and plain FSDP2 would have reduced them."""
    has_put_off: bool = False
    """Whether gradients that FSDP2 holds may be there because `set_sync` was called."""

    def __post_init__(self) -> None:
        self.gradients = GradientWatch(self.unit.name, lambda: self.unit.params)

    @property
    def has_current_groups(self) -> bool:
        """Whether process groups are still as the user wants them."""
        return self.pair is None or self.separates_reductions == self.unit.reduces_in_own_group

    @property
    def has_history(self) -> bool:
        """Whether something is kept that does not follow from the weights: a checkpoint must hold it."""
        config = self.config
        rounds_at_random = config.rounding == "stochastic" or config.gradients_pending == "bf16"
        has_history = config.weights == "delta-int4" or config.error_feedback or rounds_at_random
        return self.pair is not None and has_history

    @property
    def defers_across(self) -> bool:
        """Whether the hop across nodes can be left out, as [Note: Accumulation] in reduce_scatter.py says."""
        return self.pair is not None and self.pair.reduce_scatter.can_defer

    @property
    def fsdp2_puts_off(self) -> Literal["all-reduce", "reduction"] | None:
        """What else leaves the node, and FSDP2 itself can put off: HSDP's all-reduce, or the whole reduction
        where one collective reduces inside and across nodes."""
        unit, topology = self.unit, self.topology
        stays_in_node = topology is None or topology.is_one_node or self.defers_across
        if unit.is_hsdp or unit.group is None:
            return "all-reduce" if stays_in_node else "reduction"
        sends_nothing = topology is None and unit.group.size() == 1
        if sends_nothing or (topology is not None and self.config.route == "two-hop"):
            return None
        return "reduction"

    @property
    def has_pending(self) -> bool:
        """Whether gradients of the unit wait for cross-node sync."""
        ours = self.pair is not None and self.pair.reduce_scatter.pending is not None
        return ours or (self.has_put_off and self.unit.holds_gradients)

    def set_sync(self, requires_sync: bool, instead_of_fsdp2: bool = False) -> None:
        """Whether gradients of the next backwards go across nodes."""
        self.requires_sync, self.instead_of_fsdp2 = requires_sync, instead_of_fsdp2
        puts_off = self.fsdp2_puts_off
        if puts_off == "reduction" and not (requires_sync or instead_of_fsdp2 or self.may_hold):
            puts_off = None
        self.has_put_off |= not requires_sync and puts_off is not None
        if self.pair is not None and self.defers_across:
            self.pair.reduce_scatter.set_sync_across(requires_sync, counts_baseline=not instead_of_fsdp2)
        if puts_off == "all-reduce":
            self.unit.module.set_requires_all_reduce(requires_sync, recurse=False)
        elif puts_off == "reduction":
            self.unit.set_requires_gradient_sync(requires_sync)

    def needs_all_gradients(self) -> bool:
        """Whether the next reduction has zeros for parameters without a gradient. Kept errors need one layout
        in every step. Gradients that add up as one buffer need it while they do: with sync off, and until
        the buffer is sent. So `.grad` depends on the step, and not on those before it."""
        ours = self.pair.reduce_scatter if self.pair is not None else None
        if ours is not None and ours.feedback is not None:
            return True
        if not (self.defers_across or self.fsdp2_puts_off == "all-reduce"):
            return False
        waits = self.unit.holds_partial_sums or (ours is not None and ours.pending is not None)
        return waits or not self.requires_sync

    def waits_for_next_use(self) -> bool:
        """In a backward with sync on: whether pending gradients wait for the unit's next use in it, so that
        they cross nodes once. At the end of backward they are sent in any case."""
        if self.unit.has_more_uses:
            Variable._execution_engine.queue_callback(self._send_rest)
            return True
        return False

    def _send_rest(self) -> None:
        if self.requires_sync and self.pair is not None and self.pair.reduce_scatter.pending is not None:
            self.flush()

    def flush(self) -> None:
        """Send pending gradients across nodes."""
        before = (self.requires_sync, self.instead_of_fsdp2)
        self.set_sync(True)
        ours = self.pair.reduce_scatter.flushing() if self.pair and self.defers_across else nullcontext()
        with ours:
            self.unit.reduce_zeros()
        self.set_sync(*before)

    def drop_pending(self) -> None:
        """Forget gradients that wait for cross-node sync."""
        if self.pair is not None:
            self.pair.reduce_scatter.drop_pending()
        if self.has_put_off:
            self.unit.drop_held_gradients()

    def after_step(self, changed: Collection[int]) -> None:
        """An optimizer changed these parameters."""
        if self.pair is not None:
            self.forget_unused()
            self.pair.all_gather.after_step(changed)

    def forget_unused(self) -> None:
        """Forget weights that were gathered early and that no forward has used: the unit goes on as if they
        had not been gathered."""
        if self.pair is not None:
            self.unit.drop_early_gather()
            self.pair.all_gather.undo_unused()

    def invalidate(self) -> None:
        """The weights are others now: the next gather sends all of them."""
        if self.pair is not None:
            self.unit.drop_early_gather()
            self.pair.all_gather.invalidate()

    def remove(self) -> None:
        """Give the unit back to FSDP2, as it was."""
        if not self.requires_sync:
            self.set_sync(True)
        if self.pair is not None:
            self.unit.drop_gathered()
            self.unit.restore()
        self.unit.send_unused_as_set()
        self.pair = None

    def keeps(self) -> Footprint:
        """What is kept of the unit now."""
        if self.pair is None:
            return Footprint()
        weights, gradients = self.pair
        return Footprint(
            node_shard=sum(node_shard.nbytes for node_shard in weights.node_shards),
            errors=0 if gradients.feedback is None else gradients.feedback.nbytes,
            pending=0 if gradients.pending is None else gradients.pending.nbytes,
        )

    def will_keep(self) -> Footprint:
        """What is kept of it when all of it is in place, and gradients accumulate without cross-node sync."""
        if self.pair is None:
            return Footprint()
        weights, gradients = self.pair
        reduced = self.unit.reduced()
        return Footprint(
            node_shard=sum(group.node_shard_bytes for group in weights.groups),
            errors=gradients.error_bytes(reduced),
            pending=gradients.pending_bytes(reduced),
        )

    @property
    def remarks(self) -> list[str]:
        """What is worth knowing about the unit."""
        frozen = self.unit.frozen  # asked now: it may have been changed, or loaded, since
        return [*self.notes, frozen] if frozen else self.notes

    def describe(self) -> dict[str, str]:
        """What the unit sends, in words; the columns of `ZeroPP.summary`."""
        row = {"unit": self.unit.label, "parameters": f"{sum(p.numel() for p in self.unit.params):,}"}
        if self.pair is None or self.topology is None:
            why = f"left alone: {self.left_alone}" if self.left_alone else "removed"
            return row | {
                "nodes": "",
                "weights": "FSDP2",
                "kept bytes": "",
                "will keep": "",
                "pending": "",
                "gradients": "FSDP2",
                "notes": why,
            }
        (weights, gradients), will_keep = self.pair, self.will_keep()
        return row | {
            "nodes": self.topology.describe(),
            "weights": " -> ".join(f"{weights.codec_name(hop)} {hop.name}" for hop in weights.hops),
            "kept bytes": f"{self.keeps().total:,}",
            "will keep": f"{will_keep.node_shard + will_keep.errors:,}",
            "pending": f"{will_keep.pending:,}",
            "gradients": " -> ".join(
                f"{gradients.codec_names[hop.name]} {hop.name}" for hop in gradients.hops
            )
            + (", rotated" if self.config.rotates else ""),
            "notes": "; ".join(self.remarks),
        }


def summary_table(unit_comms: Sequence[CompressedUnit]) -> Table:
    """A line for every unit: see `ZeroPP.summary`."""
    rows = [comms.describe() for comms in unit_comms]
    table = Table(title=f"zeropp on {len(rows)} units")
    for column in rows[0]:
        table.add_column(column, justify="right" if column in NUMBERS else "left", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table


def check_configs(config: Config, overrides: Mapping[str, Config]) -> None:
    """Raise unless all of them are Configs."""
    given = {"config": config, **{f"overrides[{key!r}]": value for key, value in overrides.items()}}
    for where, value in given.items():
        if not isinstance(value, Config):
            raise TypeError(f"{where} is {value!r}; expected a zeropp.Config")


def choose_configs(units: list[Unit], config: Config, overrides: Mapping[str, Config]) -> dict[Unit, Config]:
    check_configs(config, overrides)
    chosen: dict[Unit, Config] = {}
    unmatched = set(overrides)
    for unit in units:
        matches = [p for p in overrides if any(fnmatchcase(name, p) for name in unit.names)]
        unmatched -= set(matches)
        chosen[unit] = overrides[matches[0]] if matches else config
    if unmatched:
        raise ValueError(
            f"overrides has patterns that match no unit: {sorted(unmatched)}; the units are "
            f"{[unit.name for unit in units]}"
        )
    return chosen


class Shared(NamedTuple):
    """What all units of a model have in common."""

    ledger: Ledger
    scratch: Scratch
    alarm: Alarm
    overlap: Overlap

    @classmethod
    def new(cls) -> Shared:
        return cls(Ledger(), Scratch(), Alarm(), Overlap())


def decide_comms(unit: Unit, config: Config, shared: Shared, *, may_hold: bool = True) -> CompressedUnit:
    """Decide what the unit sends. Changes nothing in the model, but may create process groups."""
    comms = CompressedUnit(unit, config, left_alone=unit.why_left_alone(), may_hold=may_hold)
    if comms.left_alone or unit.group is None:
        return comms
    comms.separates_reductions = unit.reduces_in_own_group
    comms.topology = topology = Topology.of(unit.group, config.node_size)
    on_gloo = can_overlap(unit)
    beside = UnitOverlap(unit, shared.overlap) if config.overlap and on_gloo else None
    hops, back = _hops_of(topology, config, comms.separates_reductions, in_lanes=beside is not None)
    wire = Wire(unit.name, topology, shared.ledger, shared.scratch, shared.alarm, on_gloo)
    for_weights = config
    if unit.gather_extensions() or not unit.gather_dtypes() & QUANTIZABLE_DTYPES:
        for_weights = replace(config, weights="none", delta_in_node="int8", refresh_every=0)
    comms.pair = CommPair(
        AllGather(
            *(wire, hops, for_weights, unit.gathered, unit.version, unit.trained),
            overlap=beside,
            is_early=lambda: unit.is_idle,
        ),
        ReduceScatter(
            *(wire, back[::-1], config, comms.gradients, unit.reduce_pieces, beside),
            waits=comms.waits_for_next_use,
        ),
    )
    as_they_are = _why_weights_stay(unit)
    if config.weights != "none" and as_they_are:
        comms.notes.append(f"weights sent as they are: {as_they_are}")
    reduced = unit.reduce_dtype()
    encoded = {config.gradients_in_node, config.gradients_across} != {"none"}
    if encoded and reduced is not None and reduced not in QUANTIZABLE_DTYPES:
        comms.notes.append(f"gradients sent as they are: dtype {_names({reduced})}")
    if config.weights == "int4":
        comms.notes.append("int4 weights are known to ruin training")
    if unit.is_hsdp:
        comms.notes.append("HSDP's all-reduce stays FSDP2's; on a 1-D mesh zeropp compresses all of it")
    if not config.overlap and unit.device.type != "cpu":
        comms.notes.append("overlap=False has no effect: on this device FSDP2 overlaps by itself")
    if config.secondary and topology.is_one_node:
        comms.notes.append("one node: no node shard to keep")
    if config.error_feedback and topology.is_one_node:
        comms.notes.append("one node: no hop between nodes for error feedback")
    if comms.separates_reductions:
        comms.notes.append("gradients in process groups of their own")
    return comms


def warn_if_large(unit_comms: Sequence[CompressedUnit], kept: Footprint) -> None:
    """Say so if much is going to be kept of these units, before it is allocated."""
    shards = sum(comms.unit.shard_bytes for comms in unit_comms)
    if kept.total > shards and dist.get_rank() == 0:
        logger.warning(
            "zeropp: will keep more on every rank than its shards of the parameters, %s bytes: %s. summary() "
            "has it by unit; Config(secondary=False) saves node shards, gradients_pending='bf16' half of "
            "pending gradients, error_feedback=False kept errors",
            *(f"{shards:,}", kept.describe()),
        )


def _hops_of(
    topology: Topology, config: Config, separates_reductions: bool, in_lanes: bool
) -> tuple[tuple[Hop, ...], tuple[Hop, ...]]:
    """The hops of gathers, and those of reductions, in the order of a gather."""
    directions = ("", "_reduce" if separates_reductions else "")
    if in_lanes:  # [Note: Order in a lane] in cpu/comm_threads.py
        directions = ("_gather_lane", "_reduce_lane")
    if config.route == "two-hop":
        gathers, reductions = (topology.hops(name, own_groups=in_lanes) for name in directions)
    else:
        gathers, reductions = ((topology.flat_hop(name, own_groups=in_lanes),) for name in directions)
    return gathers, reductions


def _why_weights_stay(unit: Unit) -> str | None:
    """Why the unit's weights, or some of them, cannot be encoded, or None."""
    if types := unit.gather_extensions():  # already encoded by their own type
        return f"gathered through {' and '.join(sorted(types))}"
    if others := unit.gather_dtypes() - QUANTIZABLE_DTYPES:
        return f"dtype {_names(others)}"
    return None


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
