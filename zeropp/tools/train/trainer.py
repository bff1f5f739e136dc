"""Model, optimizer and data of one run, and its training step."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ... import apply
from ..models.loading import check_fits, flops_per_token, parameter_count
from ..models.sharding import build_sharded
from .config import RunConfig
from .data import Loader
from .world import World, seed_step


class DivergedError(FloatingPointError):
    """The loss or the gradients are not finite. Raised on every rank, before the optimizer changes
    weights."""


class StepResult(NamedTuple):
    """Results of one optimizer step, over all ranks. They are the same on each rank."""

    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float
    wire_bytes: int
    across_bytes: int
    stop_requested: bool


class Trainer:
    """Every rank constructs it. Its methods are collective."""

    def __init__(self, run: RunConfig, world: World) -> None:
        self.run, self.world = run, world
        self.steps_done = 0
        self.data = Loader(
            run.data,
            rank=world.rank,
            world=world.size,
            sequence=run.batch.sequence,
            batch=run.batch.size,
            seed=run.seed,
        )
        self.model = build_sharded(run.model, run.seed, world.mesh)
        check_fits(self.model, sequence=run.batch.sequence, vocab_size=self.data.vocab_size)
        self.zpp = apply(self.model, run.zeropp)
        self.optimizer = _make_optimizer(self.model, run)
        self.parameters = parameter_count(self.model)
        self.flops_per_token = flops_per_token(self.model, run.batch.sequence)

    @property
    def tokens_per_step(self) -> int:
        batch = self.run.batch
        return self.world.size * batch.micro_batches * batch.size * batch.sequence

    def step(self, stop_requested: bool = False) -> StepResult:
        """Take one optimizer step. The result has `stop_requested` if it is True on any rank."""
        started, sent = time.perf_counter(), self.zpp.ledger.total()
        step = self.steps_done + 1
        seed_step(self.run.seed, step, self.world.rank)
        rate = self.run.schedule.learning_rate(step, self.run.steps, self.run.optimizer.learning_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

        loss = self._backward()
        now = self.zpp.ledger.total()
        # One collective for everything that ranks must agree on
        total, wire_bytes, across_bytes, stops = self.world.sum(
            loss,
            now.wire_bytes - sent.wire_bytes,
            now.across_bytes - sent.across_bytes,
            float(stop_requested),
        )
        self._check_finite(step, "loss", total)
        grad_norm = self._clip()
        self._check_finite(step, "gradient norm", grad_norm)

        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done = step
        return StepResult(
            total / self.world.size,
            grad_norm,
            rate,
            time.perf_counter() - started,
            round(wire_bytes),
            round(across_bytes),
            stops > 0,
        )

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss on the validation data."""
        self.model.eval()
        batches = [self._loss(*batch) for batch in self.data.validation(self.run.evaluation.batches)]
        self.model.train()
        assert isinstance(self.model, FSDPModule)
        self.model.reshard()  # FSDP2 keeps the root gathered for a backward pass, which an evaluation has not
        (total,) = self.world.sum(torch.stack(batches).double().mean())
        return total / self.world.size

    def tensors(self) -> dict[str, Any]:
        """Return this rank's shards of weights and optimizer state, which DCP can save and reshard."""
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        # param_groups are left out: they follow from the configuration and are not tensors.
        return {"model": get_model_state_dict(self.model), "optimizer": optimizer["state"]}

    def load_tensors(self, tensors: dict[str, Any]) -> None:
        """Load the result of `tensors()`, after DCP has read a checkpoint into it."""
        set_model_state_dict(self.model, tensors["model"])
        groups = get_optimizer_state_dict(self.model, self.optimizer)["param_groups"]
        set_optimizer_state_dict(
            self.model, self.optimizer, {"state": tensors["optimizer"], "param_groups": groups}
        )
        self.zpp.invalidate()  # DCP writes into the weights directly, which no hook of zeropp sees

    def _backward(self) -> Tensor:
        """Run forward and backward of all micro-batches. Return the mean of this rank's losses."""
        count = self.run.batch.micro_batches
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for micro_batch in range(count):
            if count > 1 and self.run.batch.sync == "step":
                self.zpp.set_requires_cross_node_sync(micro_batch == count - 1)
            loss = self._loss(*self.data.next()) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        device = self.world.device
        logits = self.model(tokens.to(device, non_blocking=True))  # [B, T, vocabulary]
        return nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.to(device, non_blocking=True).flatten()
        )

    def _clip(self) -> float:
        """Clip the gradients to `clip_norm`. Return their norm before clipping."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self.run.optimizer.clip_norm > 0:
            clip_grads_with_norm_(parameters, self.run.optimizer.clip_norm, norm)
        return norm.item()

    def _check_finite(self, step: int, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise DivergedError(
                f"the {what} of step {step} is {value}: the run has diverged. The weights are those of step "
                f"{step - 1}; the last checkpoint is complete. Try a lower optimizer.learning_rate (now "
                f"{self.run.optimizer.learning_rate:g}) or a longer schedule.warmup_steps (now "
                f"{self.run.schedule.warmup_steps})"
            )


def _make_optimizer(model: nn.Module, run: RunConfig) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    config = run.optimizer
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        fused=True,
    )
