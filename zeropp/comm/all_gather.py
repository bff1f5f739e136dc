"""The weights' collective: what takes the place of FSDP2's all-gather in one unit.

The columns of its weights come in groups (column_groups.py), each with hops and a node shard of its own
(group_gather.py). All groups are on the wire together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..config import Config
from ..cpu.comm_threads import ThreadWork, lane
from ..topology import Hop
from .column_groups import Split, Weight, buffer_of, column_groups, split_of
from .cuda_graphs import refuse_capture
from .group_gather import GroupGather
from .layout import kept_codec_name, meaning_of, why_not_the_same
from .node_shard import NodeShard
from .pipeline import finish, pipelined
from .side_stream import run_beside
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
"""Fields of Config that decide on the bytes of a node shard."""


class GatherOverlap(Protocol):
    """Hears of gathers that go on while the training thread computes: see cpu/overlap.py."""

    def before_gather(self) -> None: ...

    def gather_failed(self) -> None: ...


class AllGather:
    """Takes the place of FSDP2's all-gather in one unit."""

    def __init__(
        self,
        wire: Wire,
        hops: tuple[Hop, ...],
        config: Config,
        weights: Callable[[], tuple[Weight, ...]] = tuple,
        versions: Callable[[], Sequence[int]] = tuple,
        split: Callable[[], Split] | None = None,
        overlap: GatherOverlap | None = None,
        is_early: Callable[[], bool] = lambda: False,
    ) -> None:
        self.wire = wire
        self.config = config
        self.hops = hops
        """(across, in-node), or the only one."""
        self._ask_weights = weights
        """For the unit's parameters, in the order of a shard; empty if that is not known."""
        self._versions = versions
        """A number for each parameter: another one after every operation on it that all ranks run alike."""
        self._ask_split = split or (lambda: split_of(weights()))
        """For what is trained now; asked in every step, so it should be quick."""
        self._weights = weights()
        self._splits = [split_of(self._weights)]
        self._buffer = buffer_of(self._weights)
        """Elements of a shard, and their dtype."""
        self.groups = self._make_groups()
        self.is_exact = False
        """Whether FSDP2's own all-gather serves for now: nothing is encoded, nothing kept is used."""
        self._has_stepped = False
        """Whether an optimizer has, since the last gather."""
        self.owner: Any = None
        """Whoever installed this comm; keeps it alive with the model."""
        self._is_early = is_early
        """Whether the gather that starts now is for a use that has not begun: `used` is told when it does."""
        self._stepped_before: bool | None = None
        """`_has_stepped` before an early gather that nobody has used yet."""
        self._overlap = overlap
        """None: gathers do not go on while the training thread computes."""
        self._beside: dist.Work | None = None
        """The last gather beside the current stream or thread, until somebody needs its result."""

    @property
    def node_shards(self) -> list[NodeShard]:
        """What is kept of each group; empty if nothing is."""
        self._settle()
        return [group.node_shard for group in self.groups if group.node_shard is not None]

    def codec_name(self, hop: Hop) -> str:
        """What the hop sends, in the words of `Config`."""
        is_delta = self.config.weights == "delta-int4"
        return self.config.delta_in_node if is_delta and hop.name == "in-node" else self.config.weights

    def keep_alive(self, owner: Any) -> None:
        """Keep `owner` alive as long as the model has this comm."""
        self.owner = owner

    def after_step(self, changed: Collection[int] | None = None) -> None:
        """An optimizer changed these parameters, or all: the next gather of their groups starts from the
        shard. See [Note: Regrouping] in column_groups.py."""
        self._settle()
        if not self._has_stepped:
            self._has_stepped = True
            split = self._ask_split()
            if any(group.columns.is_split_by(split) for group in self.groups):
                self._splits.append(split)
                self.groups = self._make_groups()
        for group in self.groups:
            if group.node_shard is not None and group.columns.has_any_of(changed):
                group.node_shard.weights_changed()

    def used(self) -> None:
        """The weights that were gathered are computed with from now on."""
        if not self.is_exact:
            self._stepped_before = None
            for group in self.groups:
                if group.node_shard is not None:
                    group.node_shard.used()

    def undo_unused(self) -> None:
        """Before weights change, or are saved: an early gather that nobody has used leaves nothing behind."""
        for node_shard in self.node_shards:
            node_shard.undo_unused()
        if self._stepped_before is not None:
            self._has_stepped, self._stepped_before = self._stepped_before, None

    def invalidate(self) -> None:
        """The weights are others now: the next gather starts from the shard, and sends all of it."""
        self._give_up()
        for node_shard in self.node_shards:
            node_shard.invalidate()

    def release(self) -> None:
        """Give up the node shards, and with them the reference of differences."""
        self._give_up()
        for node_shard in self.node_shards:
            node_shard.release()

    def take_over(self, other: AllGather) -> None:
        """Go on with what `other` has kept, if it means the same under this Config."""
        if meaning_of(self.config, WEIGHTS_FIELDS) != meaning_of(other.config, WEIGHTS_FIELDS):
            return
        other._settle()
        self._weights, self._splits, self._buffer = other._weights, other._splits, other._buffer
        self.groups = self._make_groups()
        for group, kept in zip(self.groups, other.groups, strict=True):
            group.node_shard = kept.node_shard

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on as if it had not stopped."""
        me = self.wire.member(self.hops[0])
        groups = [node_shard.state_dict(me) for node_shard in self.node_shards]
        return {"groups": groups, "meaning": meaning_of(self.config, WEIGHTS_FIELDS)} if any(groups) else {}

    def why_not_load(self, state: Mapping[str, Any]) -> str | None:
        """Why `state` cannot be loaded, or None."""
        saved, mine = len(state.get("groups", [])), len(self.node_shards)
        if not saved or not self._takes_differences:
            return None
        if saved != mine:
            return (
                f"unit '{self.wire.unit}' has {saved} groups of weights; expected {mine}, by what is trained"
            )
        return why_not_the_same(self.wire.unit, "weights", state, meaning_of(self.config, WEIGHTS_FIELDS))

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Returns whether all of it is used; a Config without differences has no use for a reference."""
        groups = state.get("groups", [])
        used = groups if self._takes_differences else []
        for number, node_shard in enumerate(self.node_shards):
            node_shard.load_state_dict(used[number] if used else {})
        return len(used) == len(groups)

    @property
    def _takes_differences(self) -> bool:
        return any(node_shard.takes_differences for node_shard in self.node_shards)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        world_size, numel, dtype = self.wire.topology.size, input_tensor.numel(), input_tensor.dtype
        self._settle()
        if self._overlap is not None:
            self._overlap.before_gather()
            async_op = True
        if group.size() != world_size:
            # reshard_after_forward=int: FSDP2 gathers weights that it already has, decoded, on fewer ranks.
            return self._as_it_is(output_tensor, input_tensor, group, async_op, "post-forward")
        if (numel, dtype) != self._buffer:  # the model was cast since, or FSDP2 packs in another way
            self._weights, self._buffer = self._ask_weights(), (numel, dtype)
            self._splits = [split_of(self._weights)]
            self.groups = self._make_groups()
        self.wire.count_baseline("all_gather", sum(part.columns.numel for part in self.groups))
        if self.is_exact or self._is_as_it_is:
            return self._as_it_is(output_tensor, input_tensor, group, async_op, "flat")
        if numel == 0:
            return None
        device = input_tensor.device
        refuse_capture(self.wire.unit, device)
        self.wire.alarm.raise_if_known()
        is_early = self._is_early()
        if not is_early:
            self._stepped_before = None
        elif self._stepped_before is None:  # of several early gathers, the first
            self._stepped_before = self._has_stepped
        for part in self.groups:
            if part.node_shard is not None:
                part.node_shard.prepare(is_early, device)
        gather = partial(self._gather, input_tensor, output_tensor.view(world_size, -1), group)
        if self._overlap is not None:
            for part in self.groups:
                part.reserve(device)
            failed = self._overlap.gather_failed
            self._beside = lane("gather").run(self.wire.unit, gather, on_error=failed)
        elif async_op and device.type != "cpu":
            self._beside = run_beside(device, partial(finish, gather(0)), (output_tensor, input_tensor))
        else:
            finish(gather(0))
        return self._beside

    def _settle(self) -> None:
        """Wait for the last gather, in case that nobody has: what it leaves behind is there from now on."""
        if self._beside is not None:
            beside, self._beside = self._beside, None
            beside.wait()

    def _give_up(self) -> None:
        """Settle, without an error of the last gather: what it brings is of no use any more."""
        if isinstance(self._beside, ThreadWork):
            self._beside.give_up()
        self._settle()

    def _gather(self, shard: Tensor, out: Tensor, group: ProcessGroup, slot: int) -> Generator[None]:
        """shard [S] of every rank -> out [W, S]. Yields where it would have to wait for the wire."""
        with ExitStack() as gatherings:
            started = [
                (part, gatherings.enter_context(part.gathering(shard, out, group, slot)))
                for part in self.groups
            ]
            yield from pipelined(
                part.gather(gathering, chunk) for part, gathering in started for chunk in part.chunks
            )
        self._has_stepped = False

    def _make_groups(self) -> tuple[GroupGather, ...]:
        """Groups with nothing kept, for the buffer and the parameters as they are known."""
        groups: list[GroupGather] = []
        for columns in column_groups(self._weights, self._splits, *self._buffer):
            first_chunk = sum(len(group.chunks) for group in groups)
            groups.append(
                GroupGather(self.wire, self.hops, self.config, columns, first_chunk, self._versions)
            )
        return tuple(groups)

    @property
    def _is_as_it_is(self) -> bool:
        """Whether the backend's own all-gather does: a flat route, and nothing to encode."""
        if self.hops[0].name != "flat":
            return False
        dtypes = [group.columns.dtype for group in self.groups]
        names = [kept_codec_name(self.hops, self.config, dtype) for dtype in dtypes]
        return all(
            name == "none" or (name == "bf16" and dtype == torch.bfloat16)
            for name, dtype in zip(names, dtypes, strict=True)
        )

    def _as_it_is(
        self, output: Tensor, shard: Tensor, group: ProcessGroup, async_op: bool, hop_name: str
    ) -> dist.Work | None:
        """FSDP2's own all-gather, counted."""
        self.wire.count_ring("all_gather", hop_name, group, shard.numel() * shard.itemsize)
        work: dist.Work | None = dist.all_gather_single(output, shard, group=group, async_op=async_op)
        return work
