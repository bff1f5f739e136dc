"""The collective of a unit's weights, in the place of FSDP2's all-gather.

The columns of a unit's weights form groups (column_groups.py). Each group has its own hops and its own node
shard (group_gather.py). All groups are on the wire at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..config import Config
from ..topology import Hop
from .column_groups import Split, Weight, buffer_of, column_groups, split_of
from .execution import Comm, DiscardableWork, Execution, Inline, Transfer, pipelined
from .group_gather import GroupGather
from .layout import same_fields
from .node_shard import NodeShard
from .wire import Wire

WEIGHTS_FIELDS = (
    "weights",
    "secondary",
    "delta_in_node",
    "refresh_every",
    "block_size",
    "chunks",
    "route",
    "node_size",
)
"""Fields of Config that determine the bytes of a node shard."""


class AllGather(Comm):
    """Gathers the weights of one unit."""

    def __init__(
        self,
        wire: Wire,
        hops: tuple[Hop, ...],
        config: Config,
        weights: Callable[[], tuple[Weight, ...]] = tuple,
        versions: Callable[[], Sequence[int]] = tuple,
        split: Callable[[], Split] | None = None,
        execution: Execution | None = None,
        is_early: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make a comm for `hops`: (across, in-node), or the only one.

        Args:
            weights: the unit's parameters in the order of a shard; empty if unknown.
            versions: a number per parameter, which changes with every operation that all ranks run alike.
            split: which parameters are trained now; called in every optimizer step, so it must be quick.
            execution: how gathers run.
            is_early: whether the gather that starts now serves a use that has not begun. `used` marks its
            begin.
        """
        self.wire = wire
        self.config = config
        self.hops = hops
        self.execution: Execution = execution or Inline()
        self.is_early = is_early
        self.is_exact = False
        """Whether FSDP2's own all-gather runs for now: nothing is encoded, and no node shard is used."""
        self._ask_weights = weights
        self._versions = versions
        self._ask_split = split or (lambda: split_of(weights()))
        self._weights = weights()
        self._splits = [split_of(self._weights)]
        self._buffer = buffer_of(self._weights)
        """Elements of a shard, and their dtype."""
        self.groups = self._make_groups()
        self.has_stepped = False
        """Whether an optimizer has stepped since the last gather."""
        self.stepped_before: bool | None = None
        """`has_stepped` before the first of the early gathers that no forward has used yet; None: no such."""
        self._last: dist.Work | None = None
        """The last asynchronous gather, until its result is needed here."""

    @property
    def node_shards(self) -> list[NodeShard]:
        """The node shard of each group; empty if the Config keeps none."""
        self._settle()
        return [group.node_shard for group in self.groups if group.node_shard is not None]

    def codec_name(self, hop: Hop) -> str:
        """Name in `Config` of the codec of a hop."""
        is_delta = self.config.weights == "delta-int4"
        return self.config.delta_in_node if is_delta and hop.name == "in-node" else self.config.weights

    def after_step(self, changed: Collection[int] | None = None) -> None:
        """An optimizer has changed these parameters (None: all). The next gather of their groups sends them.

        See [Note: Regrouping] in column_groups.py.
        """
        self._settle()
        if not self.has_stepped:
            self.has_stepped = True
            split = self._ask_split()
            if any(group.columns.is_split_by(split) for group in self.groups):
                self._splits.append(split)
                self.groups = self._make_groups()
        for group in self.groups:
            if group.node_shard is not None and group.columns.has_any_of(changed):
                group.node_shard.weights_changed()

    def used(self) -> None:
        """A forward computes with the gathered weights from now on."""
        if not self.is_exact:
            self.stepped_before = None
            for group in self.groups:
                if group.node_shard is not None:
                    group.node_shard.used()

    def undo_unused(self) -> None:
        """Undo an early gather that no forward has used. Runs before weights change or are saved."""
        for node_shard in self.node_shards:
            node_shard.undo_unused()
        if self.stepped_before is not None:
            self.has_stepped, self.stepped_before = self.stepped_before, None

    def invalidate(self) -> None:
        """The weights have changed: the next gather sends all of them."""
        self._discard_last()
        for node_shard in self.node_shards:
            node_shard.invalidate()

    def release(self) -> None:
        """Free the node shards, and with them the reference of differences."""
        self._discard_last()
        for node_shard in self.node_shards:
            node_shard.release()

    def take_over(self, other: AllGather) -> None:
        """Continue with the node shards of `other`, if they mean the same under this Config."""
        if not same_fields(self.config, other.config, WEIGHTS_FIELDS):
            return
        other._settle()
        self._weights, self._splits, self._buffer = other._weights, other._splits, other._buffer
        self.groups = self._make_groups()
        for group, theirs in zip(self.groups, other.groups, strict=True):
            group.node_shard = theirs.node_shard

    @property
    def sends_differences(self) -> bool:
        return any(node_shard.takes_differences for node_shard in self.node_shards)

    def state_dict(self) -> list[dict[str, Any]]:
        """References of differences, one per group; empty if no group has one."""
        me = self.wire.member(self.hops[0])
        groups = [node_shard.state_dict(me) for node_shard in self.node_shards]
        return groups if any(groups) else []

    def why_not_load(self, groups: Sequence[dict[str, Any]]) -> str | None:
        """Why references of differences do not fit this unit, or None."""
        if len(groups) != len(self.groups):
            return (
                f"{len(groups)} groups of weights, expected {len(self.groups)}: other parameters were trained"
            )
        for group, saved in zip(self.groups, groups, strict=True):
            if saved and (why := group.why_not_load(saved)):
                return why
        return None

    def load_state_dict(
        self, groups: Sequence[dict[str, Any]], shard_group: ProcessGroup, device: torch.device
    ) -> None:
        """Restore references of differences, or forget them if `groups` is empty. Collective over the rail:
        each rank has saved its own row only."""
        self.invalidate()
        for group, saved in zip(self.groups, groups, strict=False):
            if saved:
                group.load_state_dict(saved, shard_group, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._settle()
        numel, dtype = input_tensor.numel(), input_tensor.dtype
        if group.size() != self.wire.topology.size:
            # reshard_after_forward=int: FSDP2 gathers decoded weights again, over fewer ranks.
            return self._gather_plain(output_tensor, input_tensor, group, async_op, "post-forward")
        if (numel, dtype) != self._buffer:  # the model was cast, or FSDP2 packs in another way
            self._weights, self._buffer = self._ask_weights(), (numel, dtype)
            self._splits = [split_of(self._weights)]
            self.groups = self._make_groups()
        self.wire.count_baseline("all_gather", sum(part.columns.numel for part in self.groups))
        if self.is_exact or all(part.is_plain for part in self.groups):
            return self._gather_plain(output_tensor, input_tensor, group, async_op, "flat")
        if numel == 0:
            return None
        self.wire.check(input_tensor.device)
        self._last = self.execution.submit(
            Gather(self, output_tensor, input_tensor, group), async_op=async_op
        )
        return self._last

    def _gather_plain(
        self, output: Tensor, shard: Tensor, group: ProcessGroup, async_op: bool, hop_name: str
    ) -> dist.Work | None:
        """FSDP2's own all-gather, counted."""
        self.wire.count_ring("all_gather", hop_name, group, shard.numel() * shard.itemsize)
        work: dist.Work | None = dist.all_gather_single(output, shard, group=group, async_op=async_op)
        return work

    def _settle(self) -> None:
        """Wait for the last gather: its node shards are complete from now on."""
        if self._last is not None:
            last, self._last = self._last, None
            last.wait()

    def _discard_last(self) -> None:
        """Settle without an error of the last gather, whose result is useless now."""
        if isinstance(self._last, DiscardableWork):
            self._last.discard()
        self._settle()

    def _make_groups(self) -> tuple[GroupGather, ...]:
        """Groups with empty node shards, for the current buffer and parameters."""
        groups: list[GroupGather] = []
        for columns in column_groups(self._weights, self._splits, *self._buffer):
            first_chunk = sum(len(group.chunks) for group in groups)
            groups.append(
                GroupGather(self.wire, self.hops, self.config, columns, first_chunk, self._versions)
            )
        return tuple(groups)


class Gather(Transfer):
    """One gather of a unit: shard [S] of every rank -> out [W, S]."""

    def __init__(self, comm: AllGather, output: Tensor, shard: Tensor, group: ProcessGroup) -> None:
        self.unit, self.device = comm.wire.unit, shard.device
        self.tensors = (output, shard)
        self._comm, self._group = comm, group
        self._shard, self._out = shard, output.view(comm.wire.topology.size, -1)
        self._slot = 0

    def prepare(self, slot: int) -> None:
        comm, self._slot = self._comm, slot
        is_early = comm.is_early()
        if not is_early:
            comm.stepped_before = None
        elif comm.stepped_before is None:  # of several early gathers, the first
            comm.stepped_before = comm.has_stepped
        for part in comm.groups:
            part.prepare(is_early, self.device)

    def steps(self) -> Generator[None]:
        comm, out = self._comm, self._out
        with ExitStack() as gatherings:
            started = [
                (part, gatherings.enter_context(part.gathering(self._shard, out, self._group, self._slot)))
                for part in comm.groups
            ]
            yield from pipelined(
                part.gather(gathering, chunk) for part, gathering in started for chunk in part.chunks
            )
        comm.has_stepped = False
