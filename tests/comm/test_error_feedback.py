"""Error feedback on real gloo ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

import zeropp
from tests.comm.test_reduce_scatter import gradients_of, make_reduce_scatter, reduce_once
from tests.ranks import Ranks

NUMEL = 2000


def _drift(config: zeropp.Config, steps: int) -> tuple[Tensor, Tensor]:
    """Reduce the same gradients, with a little noise, in every step: the mean result, and the exact mean."""
    comm = make_reduce_scatter(config)
    world = dist.get_world_size()
    total, exact = torch.zeros(NUMEL), torch.zeros(NUMEL)
    mine = slice(dist.get_rank() * NUMEL, (dist.get_rank() + 1) * NUMEL)
    for step in range(steps):
        ranks_gradients = [
            gradients_of(rank, world * NUMEL, torch.float32, 0)
            + 0.1 * gradients_of(rank, world * NUMEL, torch.float32, 1 + step)
            for rank in range(world)
        ]
        total += reduce_once(comm, ranks_gradients[dist.get_rank()], ReduceOp.AVG) / steps
        exact += torch.stack(ranks_gradients).mean(0)[mine] / steps
    return total, exact


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("layout", [(2, 2), (3, 1)])
def test_errors_of_many_steps_do_not_add_up(ranks: Ranks, layout: tuple[int, int], rotate: bool) -> None:
    nodes, per_node = layout
    drift = {}
    for feedback in (False, True):
        config = zeropp.Config(
            gradients_in_node="none", error_feedback=feedback, rotate=rotate, node_size=per_node
        )
        results = ranks.run(_drift, config, 30, world=nodes * per_node)
        total, exact = (torch.cat(parts) for parts in zip(*results, strict=True))
        drift[feedback] = float((total - exact).norm() / exact.norm())
    assert drift[True] < 0.25 * drift[False]


def _after_overflow(bad: float) -> tuple[bool, bool]:
    comm = make_reduce_scatter(zeropp.Config(error_feedback=True, node_size=2))
    gradients = gradients_of(dist.get_rank(), 4 * NUMEL, torch.float32, 0)
    reduce_once(comm, gradients, ReduceOp.AVG)
    broken = gradients.clone()
    broken[::7] = bad
    overflowed = bool(reduce_once(comm, broken, ReduceOp.AVG).isfinite().all())
    return overflowed, bool(reduce_once(comm, gradients, ReduceOp.AVG).isfinite().all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_overflow_does_not_come_back(ranks: Ranks, bad: float) -> None:
    assert ranks.run(_after_overflow, bad) == [(False, True)] * 4


def _another_layout() -> bool:
    comm = make_reduce_scatter(zeropp.Config(error_feedback=True, node_size=2))
    for numel in (NUMEL, 100, NUMEL):
        out = reduce_once(comm, gradients_of(dist.get_rank(), 4 * numel, torch.float32, 0), ReduceOp.AVG)
    fresh = make_reduce_scatter(zeropp.Config(error_feedback=True, node_size=2))
    again = reduce_once(fresh, gradients_of(dist.get_rank(), 4 * NUMEL, torch.float32, 0), ReduceOp.AVG)
    return torch.equal(out, again)


def test_another_layout_starts_from_zero(ranks: Ranks) -> None:
    assert all(ranks.run(_another_layout))
