"""One unit under zeropp: its Config, its comms, and the state of its gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch.autograd import Variable

from ._footprint import Footprint
from .comm import Alarm, AllGather, Ledger, ReduceScatter, Scratch, Wire
from .comm.execution import Comm, Execution, Inline
from .comm.reduce_scatter import GradientSync
from .comm.side_stream import SideStream
from .config import Config
from .cpu.comm_threads import comm_thread
from .cpu.late_gradients import LateGradients, LateReduceScatter
from .cpu.prefetch import Prefetch, PrefetchingAllGather
from .fsdp2.units import Unit
from .fsdp2.zero_grad import GradientWatch
from .quant import QUANTIZABLE_DTYPES
from .topology import Hop, Topology


class CommPair(NamedTuple):
    """zeropp's two collectives of a unit."""

    all_gather: AllGather
    reduce_scatter: ReduceScatter

    def take_over(self, others: CommPair) -> None:
        """Continue with the node shards, stored errors and counts of `others`, as far as they mean the
        same."""
        self.all_gather.take_over(others.all_gather)
        self.reduce_scatter.take_over(others.reduce_scatter)


class ModelContext(NamedTuple):
    """State that all units of a model share."""

    ledger: Ledger
    scratch: Scratch
    alarm: Alarm
    prefetch: Prefetch
    late: LateGradients

    @classmethod
    def new(cls) -> ModelContext:
        return cls(Ledger(), Scratch(), Alarm(), Prefetch(), LateGradients())

    def remove_overlap(self) -> None:
        """Restore FSDP2's settings, with no transfer left on its way."""
        self.late.abandon_failed()
        self.prefetch.remove()


class CompressedUnit:
    """A unit of the model, and the comms that zeropp gives it. Left alone: FSDP2's own comms stay in
    place."""

    def __init__(self, unit: Unit, config: Config, context: ModelContext, *, may_hold: bool = True) -> None:
        """Make the comms of `unit`. Changes nothing in the model, but may create process groups.

        Args:
            may_hold: whether FSDP2 may hold full gradients where nothing less can be deferred. False while
                "auto" searches: they may not fit into memory, and plain FSDP2 would have reduced them.
        """
        self.unit, self.config = unit, config
        self.left_alone = unit.why_left_alone()
        """Why FSDP2's own comms stay in place, or None."""
        self.topology: Topology | None = None
        self.pair: CommPair | None = None
        """zeropp's comms; None: left alone, or removed."""
        self.reduces_in_own_groups = unit.reduces_in_own_group
        """Whether hops of gradients have separate process groups, as FSDP2 was asked to have."""
        self.gradients = GradientWatch(unit.name, lambda: unit.params, self._waits_for_next_use)
        self._may_hold = may_hold
        self._has_deferred = False
        """Whether gradients that FSDP2 holds may be there because `set_sync` deferred them."""
        self._installed: tuple[Comm, Comm] | None = None
        if not self.left_alone and unit.group is not None:
            self.topology = Topology.of(unit.group, config.node_size)
            self._make_comms(context)

    def _make_comms(self, context: ModelContext) -> None:
        unit, config, topology = self.unit, self.config, self.topology
        assert topology is not None
        on_gloo = can_overlap(unit)
        in_threads = config.overlap and on_gloo
        hops, back = _hops_of(topology, config, self.reduces_in_own_groups, in_threads)
        wire = Wire(unit.name, topology, context.ledger, context.scratch, context.alarm, on_gloo)
        for_weights = config
        if unit.gather_extensions() or not unit.gather_dtypes() & QUANTIZABLE_DTYPES:
            for_weights = replace(config, weights="none", delta_in_node="int8", refresh_every=0)
        inline: Execution = Inline() if unit.device.type == "cpu" else SideStream()
        gather = AllGather(
            *(wire, hops, for_weights, unit.gathered, unit.version, unit.trained),
            execution=comm_thread("gather") if in_threads else inline,
            is_early=lambda: unit.is_idle,
        )
        reduce = ReduceScatter(
            *(wire, back[::-1], config, self.gradients, unit.reduce_pieces),
            execution=comm_thread("reduce") if in_threads else Inline(),
        )
        self.pair = CommPair(gather, reduce)
        self._installed = self.pair
        if in_threads:
            self._installed = (
                PrefetchingAllGather(gather, unit, context.prefetch, context.late),
                LateReduceScatter(reduce, unit, context.late),
            )

    def install(self, owner: Any) -> list[Any]:
        """Put the comms in place of FSDP2's. Returns handles of the hooks on the model."""
        self.unit.send_unused_while(self._needs_all_gradients)
        if self.pair is None or self._installed is None:
            return []
        self._installed[0].owner = owner
        self.unit.install(*self._installed)
        handles: list[Any] = [
            *self.unit.on_load(self.invalidate),
            *self.unit.before_forward(self.pair.all_gather.used),
        ]
        if self.pair.reduce_scatter.feedback is not None:
            handles += self.unit.on_load(self.pair.reduce_scatter.feedback.reset)
        return handles

    def remove(self) -> None:
        """Restore FSDP2's comms and switches."""
        if self.gradients.sync is not GradientSync.ACROSS:
            self.set_sync(GradientSync.ACROSS)
        if self.pair is not None:
            self.unit.drop_gathered()
            self.unit.restore()
        self.unit.send_unused_as_set()
        self.pair = self._installed = None

    @property
    def has_current_groups(self) -> bool:
        """Whether process groups are as FSDP2 is asked to have them now."""
        return self.pair is None or self.reduces_in_own_groups == self.unit.reduces_in_own_group

    @property
    def has_history(self) -> bool:
        """Whether the unit has state that cannot be rebuilt from the weights: a checkpoint must save it."""
        config = self.config
        is_random = config.rounding == "stochastic" or config.gradients_pending == "bf16"
        return self.pair is not None and (
            config.weights == "delta-int4" or config.error_feedback or is_random
        )

    # Gradient sync

    @property
    def requires_sync(self) -> bool:
        """Whether gradients of the next backward cross nodes."""
        return self.gradients.sync is GradientSync.ACROSS

    @property
    def defers_across(self) -> bool:
        """Whether the hop across nodes can be deferred: [Note: Accumulation] in comm/reduce_scatter.py."""
        return self.pair is not None and self.pair.reduce_scatter.can_defer

    @property
    def fsdp2_defers(self) -> Literal["all-reduce", "reduction"] | None:
        """The FSDP2 collective to defer while cross-node sync is off: HSDP's all-reduce, or the whole
        reduction where one collective reduces inside and across nodes. None: no other collective leaves the
        node."""
        unit, topology = self.unit, self.topology
        if unit.is_hsdp or unit.group is None:
            stays_in_node = topology is None or topology.is_one_node or self.defers_across
            return "all-reduce" if stays_in_node else "reduction"
        sends_nothing = topology is None and unit.group.size() == 1
        if sends_nothing or (topology is not None and self.config.route == "two-hop"):
            return None
        return "reduction"

    @property
    def has_pending(self) -> bool:
        """Whether gradients of the unit wait for cross-node sync."""
        ours = self.pair is not None and self.pair.reduce_scatter.pending is not None
        return ours or (self._has_deferred and self.unit.holds_gradients)

    def set_sync(self, sync: GradientSync) -> None:
        """Choose what the next backwards do with gradients."""
        self.gradients.sync = sync
        deferred = self.fsdp2_defers
        if deferred == "reduction" and sync is GradientSync.DEFERRED and not self._may_hold:
            deferred = None
        requires_sync = sync is GradientSync.ACROSS
        self._has_deferred |= not requires_sync and deferred is not None
        if deferred == "all-reduce":
            self.unit.module.set_requires_all_reduce(requires_sync, recurse=False)
        elif deferred == "reduction":
            self.unit.set_requires_gradient_sync(requires_sync)

    def flush(self) -> None:
        """Send pending gradients across nodes."""
        before = self.gradients.sync
        self.set_sync(GradientSync.ACROSS)  # FSDP2's switches, too
        self.unit.reduce_zeros(_Flush(self._installed[1]) if self._installed and self.defers_across else None)
        self.set_sync(before)

    def drop_pending(self) -> None:
        """Forget gradients that wait for cross-node sync."""
        if self.pair is not None:
            self.pair.reduce_scatter.drop_pending()
        if self._has_deferred:
            self.unit.drop_held_gradients()

    def _needs_all_gradients(self) -> bool:
        """Whether the next reduction has zeros for parameters without a gradient. Stored errors need one
        layout in every step. Gradients that add up in one buffer need one while they do: with sync deferred,
        and until the buffer is sent. So `.grad` depends on the current step, and not on earlier ones."""
        ours = self.pair.reduce_scatter if self.pair is not None else None
        if ours is not None and ours.feedback is not None:
            return True
        if not (self.defers_across or self.fsdp2_defers == "all-reduce"):
            return False
        is_pending = self.unit.holds_partial_sums or (ours is not None and ours.pending is not None)
        return is_pending or not self.requires_sync

    def _waits_for_next_use(self) -> bool:
        """In a backward with sync: whether pending gradients wait for the unit's next use in it, so that they
        cross nodes once. The end of backward sends them in any case."""
        if self.unit.has_more_uses:
            Variable._execution_engine.queue_callback(self._send_rest)
            return True
        return False

    def _send_rest(self) -> None:
        if self.requires_sync and self.pair is not None and self.pair.reduce_scatter.pending is not None:
            self.flush()

    # Changed weights

    def after_step(self, changed: Collection[int]) -> None:
        """An optimizer has changed these parameters."""
        if self.pair is not None:
            self.forget_unused()
            self.pair.all_gather.after_step(changed)

    def forget_unused(self) -> None:
        """Forget an early gather that no forward has used: the unit continues as if it had not been
        gathered."""
        if self.pair is not None:
            self.unit.drop_early_gather()
            self.pair.all_gather.undo_unused()

    def invalidate(self) -> None:
        """The weights have changed: the next gather sends all of them."""
        if self.pair is not None:
            self.unit.drop_early_gather()
            self.pair.all_gather.invalidate()

    def set_exact(self, is_exact: bool) -> bool:
        """Gather exact weights, or decoded ones again. Returns which of the two was set."""
        assert self.pair is not None
        self.unit.drop_gathered()  # FSDP2 may still hold the other kind
        before, self.pair.all_gather.is_exact = self.pair.all_gather.is_exact, is_exact
        return before

    # Memory

    def keeps(self) -> Footprint:
        """Memory of the unit now."""
        if self.pair is None:
            return Footprint()
        weights, gradients = self.pair
        return Footprint(
            node_shard=sum(node_shard.nbytes for node_shard in weights.node_shards),
            errors=0 if gradients.feedback is None else gradients.feedback.nbytes,
            pending=0 if gradients.pending is None else gradients.pending.nbytes,
        )

    def will_keep(self) -> Footprint:
        """Memory of the unit after a step in which gradients accumulate without cross-node sync."""
        if self.pair is None:
            return Footprint()
        weights, gradients = self.pair
        return Footprint(
            node_shard=sum(group.node_shard_bytes for group in weights.groups),
            errors=gradients.error_bytes(self.unit.trained_pieces()),
            pending=gradients.pending_bytes(self.unit.reduced()),
        )


class _Flush(Comm):
    """A reduce-scatter that sends pending gradients: its input is zeros, and no call of the training loop."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._inner(*args, **kwargs, is_flush=True)


def can_overlap(unit: Unit) -> bool:
    """Whether the unit is on a CPU, with a backend that sends while other threads compute."""
    return unit.device.type == "cpu" and unit.group is not None and "gloo" in dist.get_backend(unit.group)


def check_configs(config: Config, overrides: Mapping[str, Config]) -> None:
    """Raise unless all of them are Configs."""
    given = {"config": config, **{f"overrides[{key!r}]": value for key, value in overrides.items()}}
    for where, value in given.items():
        if not isinstance(value, Config):
            raise TypeError(f"{where} is {value!r}; expected a zeropp.Config")


def choose_configs(units: list[Unit], config: Config, overrides: Mapping[str, Config]) -> dict[Unit, Config]:
    """The Config of each unit: the first override whose pattern matches one of its names, or `config`."""
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


def _hops_of(
    topology: Topology, config: Config, reduces_in_own_groups: bool, in_threads: bool
) -> tuple[tuple[Hop, ...], tuple[Hop, ...]]:
    """The hops of gathers, and those of reductions, both in the order of a gather."""
    directions = ("", "_reduce" if reduces_in_own_groups else "")
    if in_threads:  # [Note: Order in a thread] in cpu/comm_threads.py
        directions = ("_gather_lane", "_reduce_lane")
    if config.route == "two-hop":
        gathers, reductions = (topology.hops(name, own_groups=in_threads) for name in directions)
    else:
        gathers, reductions = ((topology.flat_hop(name, own_groups=in_threads),) for name in directions)
    return gathers, reductions
