"""A real run to compare the dry run with: the benchmark's GPT, trained with a strategy on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function

import zeropp
from zeropp.tools.bench.workload import Workload, loss_of
from zeropp.tools.models.gpt import GPT
from zeropp.tools.models.sharding import shard_blocks
from zeropp.tools.plan.models import Model
from zeropp.tools.plan.scenario import Scenario
from zeropp.tools.strategies import Strategy

SECOND_STEP = "second step"


@dataclass(frozen=True)
class Case:
    """A strategy and a scenario, for the real run and the dry run."""

    strategy: Strategy
    workload: Workload
    nodes: int = 2
    ranks_per_node: int = 2
    micro_batches: int = 1
    checkpointing: bool = False

    def scenario(self) -> Scenario:
        return Scenario(
            Model("the benchmark's GPT", self.workload.build_model),
            self.nodes,
            self.ranks_per_node,
            micro_batch=self.workload.batch,
            sequence=self.workload.context,
            micro_batches=self.micro_batches,
            compute="fp32",
            reduce="bf16" if self.strategy.is_hsdp else "fp32",
            checkpointing=self.checkpointing,
        )


def ledger_of_second_step(case: Case) -> dict[tuple[str, str, str], tuple[int, int, int]]:
    """Return calls, wire bytes and bytes across, by unit, collective and hop."""
    step, zpp, _ = _prepare(case)
    step()
    zpp.ledger.reset()
    step()
    return {
        (key.unit, key.collective, key.hop): (traffic.calls, traffic.wire_bytes, traffic.across_bytes)
        for key, traffic in zpp.ledger.rows()
    }


def peak_of_second_step(case: Case) -> int:
    """Return the peak of torch's CPU allocator in bytes, from the profiler's records."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step, *_ = _prepare(case)  # without overlap: the profiler records the memory of one thread
        step()
        with record_function(SECOND_STEP):
            step()
    assert prof.profiler is not None
    assert prof.profiler.kineto_results is not None
    records = sorted(prof.profiler.kineto_results.events(), key=lambda record: record.start_ns())
    (begin,) = (record.start_ns() for record in records if record.name() == SECOND_STEP)
    held = peak = 0
    for record in records:
        if record.name() == "[memory]":
            held += record.nbytes()
            if record.start_ns() >= begin:
                peak = max(peak, held)
    return peak


def communication_bytes(case: Case) -> tuple[int, int]:
    """Return `ZeroPP.communication_bytes` after a second step with overlap, and the maximum in the backwards
    of its blocks."""
    step, zpp, model = _prepare(case, overlap=True)
    step()
    seen: list[int] = []
    for block in model.blocks:
        block.register_full_backward_pre_hook(lambda *_: seen.append(zpp.communication_bytes))
    step()
    return zpp.communication_bytes, max(seen)


def _prepare(case: Case, overlap: bool = False) -> tuple[Callable[[], None], zeropp.ZeroPP, GPT]:
    strategy, workload = case.strategy, case.workload
    torch.manual_seed(0)
    model = workload.build_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh} | strategy.sharding_options(case.ranks_per_node)
    if case.checkpointing:
        for position, block in enumerate(model.blocks):
            model.blocks[position] = checkpoint_wrapper(block)
    shard_blocks(model, model.blocks, **options)
    config = zeropp.Config.off() if strategy.config is None else strategy.config
    zpp = zeropp.apply(model, replace(config, node_size=case.ranks_per_node, overlap=overlap))
    set_sync = strategy.sync_switch(model, zpp)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        for micro_batch in range(case.micro_batches):
            set_sync(micro_batch == case.micro_batches - 1)
            tokens = torch.randint(256, (workload.batch, workload.context))
            (loss_of(model(tokens), tokens) / case.micro_batches).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step, zpp, model
