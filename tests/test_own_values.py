"""What a parameter receives depends on its own values only: replicas stay equal, exact zeros stay zeros, and
small parameters survive next to large ones. Through FSDP2, on real ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeropp
from tests.comm.test_all_gather import gather, make_all_gather
from tests.comm.test_reduce_scatter import make_reduce_scatter, reduce_once
from tests.configs import CONFIGS
from tests.ranks import Ranks
from tests.training import local
from zeropp.comm.column_groups import Weight
from zeropp.comm.reduce_scatter import GradientSync

PENDING = zeropp.Config(gradients_pending="bf16", node_size=2)
ALL = CONFIGS | {"pending bf16": PENDING}
WIDTH = 20


class Layer(nn.Module):
    """A norm and biases that tensor parallelism replicates, next to matrices that it splits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 36)
        self.down = nn.Linear(36, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.down(torch.tanh(self.up(self.norm(x)))))


def _train_with_tensor_parallelism(
    config: zeropp.Config, norms_are_dtensors: bool
) -> list[tuple[str, Tensor]]:
    """Parameters that are replicated over tp, after four steps: the shard of this rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    for layer in model:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if norms_are_dtensors:  # as sequence parallelism has them
            _replicate(cast(Layer, layer).norm, mesh["tp"])
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    zpp = zeropp.apply(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    for _ in range(4):
        optimizer.zero_grad()
        for is_last in (False, True):
            zpp.set_requires_cross_node_sync(is_last)
            model(torch.randn(8, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
    replicated = ("norm.weight", "norm.bias", "down.bias")
    return [(name, local(p).detach()) for name, p in model.named_parameters() if name.endswith(replicated)]


def _replicate(norm: nn.LayerNorm, mesh: DeviceMesh) -> None:
    for name, parameter in list(norm.named_parameters()):
        norm.register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, mesh, [Replicate()])))
    norm.register_forward_pre_hook(
        lambda _, inputs: (DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False),)
    )
    norm.register_forward_hook(lambda _, __, output: output.to_local())


@pytest.mark.parametrize("norms_are_dtensors", [False, True], ids=["tensors", "DTensors"])
@pytest.mark.parametrize("name", ALL)
def test_replicas_of_tensor_parallelism_stay_equal(ranks: Ranks, name: str, norms_are_dtensors: bool) -> None:
    config = ALL[name]
    shards = ranks.run(_train_with_tensor_parallelism, config, norms_are_dtensors)
    for first, second in ((0, 1), (2, 3)):  # tp ranks that hold the same shard
        assert len(shards[first]) == 6
        for (parameter, ours), (_, theirs) in zip(shards[first], shards[second], strict=True):
            assert torch.equal(ours, theirs), parameter


def _with_neighbours(config: zeropp.Config, numel: int, before: int, after: int) -> list[Tensor]:
    """A parameter's gradients and weights over some steps, next to others of these lengths."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lengths = [before, numel, after]
    at = slice(before, before + numel)
    reducer = make_reduce_scatter(config, lengths)
    weights = tuple(Weight(length, torch.float32) for length in lengths)
    gatherer = make_all_gather(config, weights)
    reduced, gathered = [], []
    own, other = (torch.Generator().manual_seed(seed) for seed in (rank, 1000 * before + after + rank))
    shard = torch.randn(sum(lengths), generator=other)
    shard[at] = torch.randn(numel, generator=own)
    for step in range(3):
        full = 100 * torch.randn(world, sum(lengths), generator=other)
        full[:, at] = torch.randn(world, numel, generator=own)
        reducer.gradients.sync = GradientSync.ACROSS if step else GradientSync.DEFERRED
        reduced.append(reduce_once(reducer, full.flatten(), dist.ReduceOp.AVG)[at].clone())
        gathered.append(gather(gatherer, shard).view(world, -1)[:, at].clone())
        change = torch.randn(sum(lengths), generator=other)
        change[at] = torch.randn(numel, generator=own)
        shard += 0.01 * change
        gatherer.after_step()
    return reduced + gathered


def _differing(config: zeropp.Config) -> list[int]:
    """Lengths of parameters that neighbours have an influence on."""
    found = []
    for numel in (3, 16, 17, 64, 100, 129, 1000):
        alone, *others = (
            _with_neighbours(config, numel, before, after) for before, after in ((0, 0), (5, 300), (128, 64))
        )
        for received in others:
            if not all(torch.equal(one, other) for one, other in zip(alone, received, strict=True)):
                found.append(numel)
    return found


@pytest.mark.parametrize("name", ALL)
def test_neighbours_have_no_influence(ranks: Ranks, name: str) -> None:
    """In groups of two hops whose units differ: as the embeddings of two pipeline stages."""
    assert ranks.run(_differing, ALL[name]) == [[]] * 4


SHAPES: dict[str, tuple[int, ...]] = {
    **{f"embedding of {columns}": (50, columns) for columns in (100, 96, 72, 33, 64)},
    "experts": (5, 6, 10),
    "wide experts": (5, 16, 8),
    "lora a": (8, 40),
    "lora b": (40, 8),
    "convolution": (8, 3, 3, 3),
    **{f"vector of {numel}": (numel,) for numel in (1, 2, 3, 7, 16, 17, 33, 48, 63, 100)},
}


class Sparse(nn.Module):
    """Parameters whose gradients are known, and zero in every third row on every rank."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, slopes: dict[str, Tensor]) -> Tensor:
        return torch.stack([(slopes[name] * p).sum() for name, p in self.named_parameters()]).sum()


def is_absent(rows: int) -> Tensor:
    return torch.arange(rows) % 3 == 1


def _train_sparse(config: zeropp.Config) -> dict[str, tuple[bool, float]]:
    """By parameter: whether absent rows have moved, or have a gradient; the error of all other gradients."""
    model = Sparse()
    fully_shard(model)
    zpp = zeropp.apply(model, config)
    start = {name: cast(DTensor, p).full_tensor().detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    generators = [torch.Generator().manual_seed(rank) for rank in range(dist.get_world_size())]
    found: dict[str, tuple[bool, float]] = {}
    for _ in range(6):
        optimizer.zero_grad()
        means = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for is_last in (False, True):
            zpp.set_requires_cross_node_sync(is_last)
            everyone = [
                {name: _slope(shape, generator) for name, shape in SHAPES.items()} for generator in generators
            ]
            for slopes in everyone:
                for name, slope in slopes.items():
                    means[name] += slope / len(everyone)
            model(everyone[dist.get_rank()]).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        absent = is_absent(parameter.shape[0])
        gradient = cast(DTensor, parameter.grad).full_tensor()
        moved = cast(DTensor, parameter).full_tensor().detach() - start[name]
        is_touched = bool(gradient[absent].any() or moved[absent].any())
        found[name] = (is_touched, float((gradient - means[name]).norm() / means[name].norm()))
    return found


def _slope(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    slope = torch.randn(shape, generator=generator)
    slope[is_absent(shape[0])] = 0.0
    return slope


@pytest.mark.parametrize("name", ALL)
def test_rows_without_gradients_stay_where_they_are(ranks: Ranks, name: str) -> None:
    for parameter, (is_touched, error) in ranks.run(_train_sparse, ALL[name])[0].items():
        assert not is_touched, parameter
        assert error < 0.35, parameter  # int4, rounding at random


class Norms(nn.Module):
    """Biases of a thousandth next to weights near one, as in a young LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width, generator=generator))
        self.bias = nn.Parameter(1e-3 * torch.randn(width, generator=generator))
        self.slopes = (
            torch.randn(width, generator=generator),
            1e-3 * torch.randn(width, generator=generator),
        )
        self.seen: list[Tensor] = []

    def forward(self) -> Tensor:
        self.seen = [self.weight.detach().clone(), self.bias.detach().clone()]
        return (self.slopes[0] * self.weight).sum() + (self.slopes[1] * self.bias).sum()


def _norm_errors(config: zeropp.Config, width: int) -> tuple[list[float], list[float]]:
    model = Norms(width)
    exact = [p.detach().clone() for p in model.parameters()]
    fully_shard(model)
    zeropp.apply(model, config)
    model().backward()
    gradients = [cast(DTensor, p.grad).full_tensor() for p in model.parameters()]
    return (
        [float((seen - true).norm() / true.norm()) for seen, true in zip(model.seen, exact, strict=True)],
        [float((g - true).norm() / true.norm()) for g, true in zip(gradients, model.slopes, strict=True)],
    )


@pytest.mark.parametrize("width", [16, 64, 256, 1024])
def test_small_biases_survive_next_to_large_weights(ranks: Ranks, width: int) -> None:
    for config in (zeropp.Config(node_size=2), replace(PENDING, rounding="stochastic")):
        weights, gradients = ranks.run(_norm_errors, config, width)[0]
        assert max(weights) < 0.01
        assert max(gradients) < 0.3
