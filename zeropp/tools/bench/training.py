"""Training of a model with a strategy, on one rank of the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from ... import ZeroPP, apply
from ..models.loading import parameter_count
from ..models.sharding import shard_blocks
from ..strategies import Strategy
from .deepspeed_peer import DeepSpeedTraining
from .workload import Data, Workload, loss_of


class BenchTraining(Protocol):
    """A model in training, with any library."""

    def step(self, micro_batches: int) -> float:
        """Take one optimizer step and return the loss of this rank."""

    def parameters(self) -> int: ...
    def model_state_bytes(self) -> int: ...
    def communication_bytes(self) -> int: ...
    def ledger_bytes(self) -> int | None:
        """Return the bytes that this rank has sent to other nodes, from its ledger. None: no ledger."""

    @property
    def phase_bytes(self) -> list[int]:
        """Bytes that this rank has sent to other nodes in each phase of the last step: forward and backward
        of each micro-batch, optimizer. Empty if unknown."""


class FsdpTraining:
    """A model that FSDP2 trains, with or without zeropp. See `BenchTraining`."""

    def __init__(self, strategy: Strategy, workload: Workload, ranks_per_node: int) -> None:
        self.strategy = strategy
        torch.manual_seed(workload.seed)
        self.model = workload.build_model()
        self._parameters = parameter_count(self.model)
        shard_blocks(self.model, self.model.blocks, **strategy.sharding_options(ranks_per_node))
        self.zpp: ZeroPP | None = None
        if strategy.config is not None or strategy.is_auto:
            self.zpp = apply(self.model, "auto" if strategy.is_auto else strategy.config)
        if strategy.engine == "compute":
            send_nothing(self.model)
        self.optimizer = workload.make_optimizer(self.model)
        self.data = Data(workload, dist.get_rank())
        self.phase_bytes: list[int] = []

    def step(self, micro_batches: int) -> float:
        set_sync = self.strategy.sync_switch(self.model, self.zpp)
        total = torch.zeros(())
        self.phase_bytes.clear()
        self._sent_before = self.ledger_bytes() or 0
        for micro_batch in range(micro_batches):
            set_sync(micro_batch == micro_batches - 1)
            tokens, targets = self.data.next()
            loss = loss_of(self.model(tokens), targets) / micro_batches
            self._end_phase()
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            self._end_phase()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._end_phase()
        if self.strategy.engine == "compute":
            # Without communication ranks would drift apart, and slow ranks would get the cores of fast ones.
            dist.barrier()
        return total.item()

    def _end_phase(self) -> None:
        sent = self.ledger_bytes() or 0
        self.phase_bytes.append(sent - self._sent_before)
        self._sent_before = sent

    def choose(self, micro_batches: int) -> str:
        """Take steps until `apply(model, "auto")` has chosen a Config, and return its name."""
        search = None if self.zpp is None else self.zpp.search
        assert search is not None
        while search.chosen is None:  # all ranks choose after the same step
            self.step(micro_batches)
        return search.chosen

    def parameters(self) -> int:
        return self._parameters

    def model_state_bytes(self) -> int:
        """Return the bytes of sharded weights, of their gradients (equally many) and of optimizer state."""
        weights = sum(_local(p).nbytes for p in self.model.parameters())
        state = [v for values in self.optimizer.state.values() for v in values.values()]
        return 2 * weights + sum(_local(value).nbytes for value in state if isinstance(value, Tensor))

    def communication_bytes(self) -> int:
        return 0 if self.zpp is None else self.zpp.communication_bytes

    def ledger_bytes(self) -> int | None:
        return None if self.zpp is None else self.zpp.ledger.total().across_bytes


def start_training(strategy: Strategy, workload: Workload, ranks_per_node: int) -> BenchTraining:
    if strategy.engine == "deepspeed":
        return DeepSpeedTraining(strategy, workload, ranks_per_node)
    return FsdpTraining(strategy, workload, ranks_per_node)


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def send_nothing(model: nn.Module) -> None:
    """Install comms that send nothing, so that steps are compute only."""
    modules: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_custom_all_gather(_NoAllGather())
        module.set_custom_reduce_scatter(_NoReduceScatter())


class _NoAllGather:
    """All-gather without communication. It fills the first output with copies of this rank's shard, and keeps
    it: weights have a plausible magnitude at no cost."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._buffer is None:
            return torch.empty(*size, dtype=dtype, device=device)
        return self._buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        if self._buffer is None:
            output_tensor.view(group.size(), -1).copy_(input_tensor.clone())
            self._buffer = output_tensor


class _NoReduceScatter:
    """Reduce-scatter without communication. It returns this rank's part of its own gradients."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None  # of full gradients; the output must be new, as it becomes `.grad`

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._buffer is not None and self._buffer.shape == torch.Size(size):
            return self._buffer
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
        self._buffer = input_tensor
