"""A fake step: a step of real training code, recorded, on ranks and tensors that do not exist.

A `fake` process group has any number of ranks and sends nothing; fake tensors have shapes and no content. All
else is what a cluster would run: FSDP2, zeropp's comms, the ledger, the optimizer. It plays rank 0, which has
the largest shards where they are not equal.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from ... import Config, apply
from ...cpu.comm_threads import MAX_TRANSFERS
from ..models.sharding import shard_blocks
from ..strategies import Strategy
from .fake_mode import QuickFakeTensorMode
from .memory_estimate import LiveStorages, MemoryEstimate, nbytes_of
from .models import Model, PlanError, are_alike, find_blocks, loss_of, raised_by_user
from .repeat_layers import Part
from .scenario import Scenario
from .step_recorder import RecordedComm, StepRecorder
from .trace import Gather, Reduce, ShardGroup

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Recording:
    """What a step did, with as many layers as were asked for."""

    parts: list[Part]
    """The micro-batches, then the optimizer."""
    parameters: int
    layers_name: str
    """Name of the list of layers in the model."""
    layers: int
    """How many the whole model has."""
    are_alike: bool
    """Whether all layers of the whole model do the same."""
    lanes_bytes: int
    """What comes on top of this memory if lanes send; [Note: Memory of what is late] in cpu/overlap.py."""


def record_step(scenario: Scenario, strategy: Strategy, layers: int | None = None) -> Recording:
    """Record a step, after one to get going, of the model with its first `layers` layers, or with all."""
    if dist.is_initialized():
        raise PlanError(
            "a dry run needs a process group of its own, and this process has one already; call "
            "torch.distributed.destroy_process_group() first"
        )
    if strategy.engine != "fsdp2":
        raise PlanError(f"strategy {strategy.name!r} runs {strategy.engine}; a dry run knows FSDP2 only")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=scenario.world_size)
    try:
        mesh = init_device_mesh("cpu", (scenario.world_size,))  # outside the mode: a mesh has content
        options = {"mesh": mesh} | strategy.sharding_options(scenario.ranks_per_node)
        with _no_logs(), _explained(scenario.model), QuickFakeTensorMode(allow_non_fake_inputs=True):
            return _FakeStep(scenario, strategy, options, layers).run()
    finally:
        dist.destroy_process_group()


class _FakeStep:
    """A sharded model with its optimizer, watched by a recorder."""

    def __init__(
        self, scenario: Scenario, strategy: Strategy, options: dict[str, Any], layers: int | None
    ) -> None:
        self._scenario, self._strategy = scenario, strategy
        self._storages = LiveStorages()
        self._recorder = StepRecorder(self._storages)
        with self._recorder:
            self._model = scenario.model.build().train()
            self._layers_name, blocks = find_blocks(self._model)
            self._layers, self._are_alike = len(blocks), are_alike(blocks)
            del blocks[self._layers if layers is None else layers :]
            _shard(self._model, blocks, scenario, options)
        self._parameters = list(self._model.parameters())
        config = Config.off() if strategy.config is None else strategy.config
        self._zpp = apply(self._model, replace(config, node_size=scenario.ranks_per_node))
        self._set_sync = strategy.sync_switch(self._model, self._zpp)
        # One optimizer per unit costs what one for all does, and shows whose parameters it works on. Fused:
        # the others read the step number from a tensor, and a fake one has none.
        self._optimizers = {
            comms.unit.name: torch.optim.AdamW(comms.unit.params, fused=True)
            for comms in self._zpp.unit_comms
        }
        self._shard_bytes = self._state_bytes = 0
        self._watch()

    def run(self) -> Recording:
        with self._recorder:
            self._step(micro_batches=1)
            # From now on neither changes: FSDP2 is set up, and the optimizers have their state.
            states = [state for o in self._optimizers.values() for state in o.state.values()]
            self._state_bytes = nbytes_of(value for state in states for value in state.values())
            self._shard_bytes = nbytes_of(self._parameters)
            self._recorder.start(self._breakdown)
            parts = self._step(self._scenario.micro_batches)
        return Recording(
            parts,
            sum(p.numel() for p in self._parameters),
            self._layers_name,
            self._layers,
            self._are_alike,
            self._lanes_bytes(),
        )

    def _lanes_bytes(self) -> int:
        """Buffers of the hops, once more for each further job of a lane, and what the jobs and the one that
        waits for them reduce to."""
        all_comms = self._zpp.unit_comms
        buffers = self._zpp.communication_bytes - sum(comms.keeps().total for comms in all_comms)
        reduced = max(nbytes_of(comms.unit.params) for comms in all_comms)
        return (MAX_TRANSFERS - 1) * buffers + (MAX_TRANSFERS + 1) * reduced

    def _watch(self) -> None:
        for comms in self._zpp.unit_comms:
            unit, topology = comms.unit, comms.topology
            self._recorder.watch(unit.name, unit.module)
            if self._strategy.is_hsdp:
                unit.on_all_reduce(self._all_reduced(unit.name))
            if comms.pair is not None and topology is not None:
                nodes = len(topology.nodes)
                shard_group = ShardGroup(nodes, topology.size // nodes)
                record = partial(
                    RecordedComm,
                    unit=unit.name,
                    shard_group=shard_group,
                    ledger=self._zpp.ledger,
                    recorder=self._recorder,
                )
                unit.install(record(comms.pair.all_gather, Gather), record(comms.pair.reduce_scatter, Reduce))

    def _all_reduced(self, unit: str) -> Any:
        return lambda gradients: self._recorder.replicas_reduced(unit, gradients, self._scenario.nodes)

    def _step(self, micro_batches: int) -> list[Part]:
        """One optimizer step; the parts of it."""
        scenario, parts = self._scenario, []
        for micro_batch in range(micro_batches):
            self._set_sync(micro_batch == micro_batches - 1)
            loss = loss_of(self._model, scenario.micro_batch, scenario.sequence) / micro_batches
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            parts.append(self._recorder.take())
        for unit, optimizer in self._optimizers.items():
            with self._recorder.optimizer_of(unit):
                optimizer.step()
        parts.append(self._recorder.take())
        for optimizer in self._optimizers.values():
            optimizer.zero_grad()
        return parts

    def _breakdown(self) -> MemoryEstimate:
        """Memory now. What has no other name is an activation."""
        shards = self._shard_bytes
        gradients = nbytes_of(p.grad for p in self._parameters if p.grad is not None)
        node_shards, gathered = self._zpp.node_shard_bytes, self._storages.resized_bytes
        communication = self._zpp.communication_bytes - node_shards
        named = shards + gradients + self._state_bytes + node_shards + gathered + communication
        activations = self._storages.nbytes - named
        return MemoryEstimate(
            shards, self._state_bytes, gradients, node_shards, gathered, communication, activations
        )


def _shard(model: nn.Module, blocks: nn.ModuleList, scenario: Scenario, options: dict[str, Any]) -> None:
    """fully_shard, layer by layer, with the rest in the root unit."""
    if scenario.checkpointing:
        for position, block in enumerate(blocks):
            blocks[position] = checkpoint_wrapper(block, preserve_rng_state=False)
    compute, reduce = DTYPES[scenario.compute], DTYPES[scenario.reduce]
    options = options | {"mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)}
    # Outside the mode, because FSDP2 may make a mesh, and a mesh has content. Parameters stay fake.
    with unset_fake_temporarily():
        shard_blocks(model, blocks, **options)


@contextmanager
def _no_logs() -> Iterator[None]:
    """Those of zeropp, which are for a model that is trained."""
    logger = logging.getLogger("zeropp")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _explained(model: Model) -> Iterator[None]:
    """Turn what fake tensors cannot do, and what goes wrong in a user's model, into an error that says what
    to change."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise PlanError(
            f"the model {model.name!r} decides something by the content of a tensor ({error}), and in a dry "
            "run tensors have none; look for .item(), bool(tensor), nonzero() or a mask as an index on its "
            "way, and replace it, or plan for a model of the same size without it"
        ) from error
    except Exception as error:
        if not model.is_users:
            raise
        raise raised_by_user(model.name, error) from error
