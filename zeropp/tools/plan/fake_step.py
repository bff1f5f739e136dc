"""A fake step: real training code, recorded, with a fake process group and fake tensors.

A `fake` process group has any number of ranks and sends nothing. Fake tensors have shapes and no content.
Everything else is the code that a cluster runs: FSDP2, zeropp's comms, the ledger, the optimizer. This
process is rank 0, whose shards are the largest if shards are uneven.
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
from .models import Model, PlanError, are_alike, find_blocks, loss_of, user_error
from .repeat_layers import StepPart
from .scenario import Scenario
from .step_recorder import RecordedComm, StepRecorder
from .trace import Gather, Reduce, ShardGroup

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Recording:
    """Events and memory of one optimizer step."""

    parts: list[StepPart]
    """The micro-batches, then the optimizer."""
    parameters: int
    """Elements of all parameters of the recorded layers and of the rest of the model."""
    layers_name: str
    """Name of the list of layers in the model."""
    layer_count: int
    """Number of layers of the whole model, recorded or not."""
    layers_are_alike: bool
    """Whether all layers of the whole model have the same modules, settings and shapes."""
    comm_thread_bytes: int
    """Additional memory if CPU threads communicate: see [Note: Memory of late gradients] in
    cpu/late_gradients.py."""


def record_step(scenario: Scenario, strategy: Strategy, layers: int | None = None) -> Recording:
    """Record the second step of a model.

    Args:
        scenario: the model, the ranks, the batch.
        strategy: how to train.
        layers: number of layers to keep, from the first one; None: all.
    """
    if dist.is_initialized():
        raise PlanError(
            "a dry run creates a process group, and this process already has one; call "
            "torch.distributed.destroy_process_group() first"
        )
    if strategy.engine != "fsdp2":
        raise PlanError(
            f"strategy {strategy.name!r} runs {strategy.engine}; expected a strategy that runs FSDP2"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=scenario.world_size)
    try:
        mesh = init_device_mesh("cpu", (scenario.world_size,))  # outside the fake mode: it has content
        options = {"mesh": mesh} | strategy.sharding_options(scenario.ranks_per_node)
        fake_mode = QuickFakeTensorMode(allow_non_fake_inputs=True)
        with _silence_zeropp(), _explain_errors(scenario.model), fake_mode:
            return _FakeStep(scenario, strategy, options, layers).run()
    finally:
        dist.destroy_process_group()


class _FakeStep:
    """A sharded model with its optimizers and a recorder."""

    def __init__(
        self, scenario: Scenario, strategy: Strategy, options: dict[str, Any], layers: int | None
    ) -> None:
        self._scenario, self._strategy = scenario, strategy
        self._storages = LiveStorages()
        self._recorder = StepRecorder(self._storages)
        with self._recorder:
            self._model = scenario.model.build().train()
            self._layers_name, blocks = find_blocks(self._model)
            self._layer_count, self._layers_are_alike = len(blocks), are_alike(blocks)
            del blocks[self._layer_count if layers is None else layers :]
            _shard(self._model, blocks, scenario, options)
        self._parameters = list(self._model.parameters())
        config = Config.off() if strategy.config is None else strategy.config
        self._zpp = apply(self._model, replace(config, node_size=scenario.ranks_per_node))
        self._set_sync = strategy.sync_switch(self._model, self._zpp)
        # One optimizer per unit costs as much as one for all, and its operations count for the unit. Fused,
        # because other implementations read the step number from a tensor, and fake tensors have no content.
        self._optimizers = {
            comms.unit.name: torch.optim.AdamW(comms.unit.params, fused=True)
            for comms in self._zpp.unit_comms
        }
        self._shard_bytes = self._state_bytes = 0
        self._install_recorder()

    def run(self) -> Recording:
        with self._recorder:
            self._step(micro_batches=1)  # sets up FSDP2 and the state of the optimizers
            states = [state for o in self._optimizers.values() for state in o.state.values()]
            self._state_bytes = nbytes_of(value for state in states for value in state.values())
            self._shard_bytes = nbytes_of(self._parameters)
            self._recorder.start(self._breakdown)
            parts = self._step(self._scenario.micro_batches)
        return Recording(
            parts,
            parameters=sum(p.numel() for p in self._parameters),
            layers_name=self._layers_name,
            layer_count=self._layer_count,
            layers_are_alike=self._layers_are_alike,
            comm_thread_bytes=self._comm_thread_bytes(),
        )

    def _comm_thread_bytes(self) -> int:
        """Bytes that `MAX_TRANSFERS` concurrent jobs need on top of one: another set of buffers for each
        further job, and a reduced shard for each job and for one that waits."""
        all_comms = self._zpp.unit_comms
        buffers = self._zpp.communication_bytes - sum(comms.keeps().total for comms in all_comms)
        reduced = max(nbytes_of(comms.unit.params) for comms in all_comms)
        return (MAX_TRANSFERS - 1) * buffers + (MAX_TRANSFERS + 1) * reduced

    def _install_recorder(self) -> None:
        for comms in self._zpp.unit_comms:
            unit, topology = comms.unit, comms.topology
            self._recorder.current_unit.watch(unit.name, unit.module)
            if self._strategy.is_hsdp:
                add = self._recorder.add_replica_reduction
                unit.on_all_reduce(partial(add, unit.name, ranks=self._scenario.nodes))
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

    def _step(self, micro_batches: int) -> list[StepPart]:
        """Run one optimizer step and return its parts."""
        scenario, parts = self._scenario, []
        for micro_batch in range(micro_batches):
            self._set_sync(micro_batch == micro_batches - 1)
            loss = loss_of(self._model, scenario.micro_batch, scenario.sequence) / micro_batches
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            parts.append(self._recorder.take())
        for unit, optimizer in self._optimizers.items():
            with self._recorder.current_unit.optimizer_of(unit):
                optimizer.step()
        parts.append(self._recorder.take())
        for optimizer in self._optimizers.values():
            optimizer.zero_grad()
        return parts

    def _breakdown(self) -> MemoryEstimate:
        """Return the memory in use. Everything without another purpose counts as activations."""
        shards = self._shard_bytes
        gradients = nbytes_of(p.grad for p in self._parameters if p.grad is not None)
        node_shards, gathered = self._zpp.node_shard_bytes, self._storages.resized_bytes
        communication = self._zpp.communication_bytes - node_shards
        named = shards + gradients + self._state_bytes + node_shards + gathered + communication
        activations = self._storages.nbytes - named
        return MemoryEstimate(
            shards=shards,
            optimizer_state=self._state_bytes,
            gradients=gradients,
            node_shards=node_shards,
            gathered=gathered,
            communication=communication,
            activations=activations,
        )


def _shard(model: nn.Module, blocks: nn.ModuleList, scenario: Scenario, options: dict[str, Any]) -> None:
    """Apply fully_shard to each layer, and to the model for all other parameters."""
    if scenario.checkpointing:
        for position, block in enumerate(blocks):
            blocks[position] = checkpoint_wrapper(block, preserve_rng_state=False)
    compute, reduce = DTYPES[scenario.compute], DTYPES[scenario.reduce]
    options = options | {"mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)}
    # Outside the fake mode, because FSDP2 may create a mesh, which has content. Parameters stay fake.
    with unset_fake_temporarily():
        shard_blocks(model, blocks, **options)


@contextmanager
def _silence_zeropp() -> Iterator[None]:
    """Disable zeropp's logger: its messages are about a real training."""
    logger = logging.getLogger("zeropp")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _explain_errors(model: Model) -> Iterator[None]:
    """Turn errors of fake tensors and of a user's model into a PlanError that says what to change."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise PlanError(
            f"the model {model.name!r} depends on the content of a tensor ({error}), and tensors of a dry "
            "run have no content; replace .item(), bool(tensor), nonzero() or a mask as an index, or plan "
            "for a model of the same size without them"
        ) from error
    except Exception as error:
        if not model.is_user_function:
            raise
        raise user_error(model.name, error) from error
