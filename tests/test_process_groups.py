"""Hop groups that only their members make, whatever groups each rank has made before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

import zeropp
from tests.configs import CONFIGS
from tests.ranks import HANG_SECONDS, Ranks
from tests.training import Trainer, make_net
from zeropp import process_groups as groups
from zeropp._describe import remarks
from zeropp.topology import Topology


def _hop_sums(group: dist.ProcessGroup | None = None) -> list[int]:
    """What the hop groups of 2 ranks a node connect: sum the ranks over each."""
    group = group or dist.group.WORLD
    assert group is not None
    sums = []
    for hop in Topology.of(group, 2).hops():
        value = torch.tensor(10 ** dist.get_rank())
        dist.all_reduce(value, group=hop.group)
        sums.append(int(value.item()))
    return sums


ON_2X2 = [[101, 11], [1010, 11], [101, 1100], [1010, 1100]]


def _threads_of_gloo() -> int:
    names = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop\n")


def _new_threads_of_gloo(make: Callable[[], Any]) -> int:
    before, group = _threads_of_gloo(), make()
    value = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(value, group=group)
    assert int(value.item()) == 1111
    return _threads_of_gloo() - before


def _threads_by_group() -> tuple[int, int]:
    everyone = list(range(4))
    return (
        _new_threads_of_gloo(lambda: dist.new_group(everyone)),
        _new_threads_of_gloo(lambda: groups.group_of(everyone, "no_thread")),
    )


def test_a_group_of_ours_takes_no_thread(ranks: Ranks) -> None:
    assert ranks.run(_threads_by_group) == [(1, 0)] * 4


def _make_groups_of_its_own() -> None:
    """Another number of groups on every rank of a node."""
    if dist.get_rank() in (0, 2):
        dist.new_group([0, 2], use_local_synchronization=True)
    if dist.get_rank() == 3:
        dist.new_group([3], use_local_synchronization=True)
        dist.new_group([3], use_local_synchronization=True)


def _apply_with_other_groups() -> list[list[float]]:
    _make_groups_of_its_own()
    first, second = Trainer(CONFIGS["default"]), Trainer(CONFIGS["default"])
    losses = [[trainer.step() for _ in range(2)] for trainer in (first, second)]
    _make_groups_of_its_own()
    zeropp.apply(first.net, CONFIGS["paper"])
    first.step()
    assert zeropp.apply(second.net, CONFIGS["default"]) is second.zpp
    return losses


def test_ranks_with_different_numbers_of_groups(ranks: Ranks) -> None:
    """Two models, and a second apply after still more groups."""
    for first, second in ranks.run(_apply_with_other_groups):
        assert first == second


def _sub_group() -> Any:
    """Ranks 4 and 5 know nothing of it; nor do the members know what they are doing."""
    if dist.get_rank() >= 4:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return None
    group = dist.new_group([0, 1, 2, 3], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    _make_groups_of_its_own()
    mesh = DeviceMesh.from_group(group, "cpu")
    zpp = zeropp.apply(make_net(mesh=mesh), zeropp.Config(node_size=2))
    assert "2 nodes x 2 ranks" in zpp.summary()
    return _hop_sums(group)


def test_only_the_ranks_of_the_shard_group_take_part(ranks: Ranks) -> None:
    assert ranks.run(_sub_group, world=6) == [*ON_2X2, None, None]


def _again(folder: str, device_id: torch.device | None) -> list[list[int]]:
    """Hop groups of one world, and of the next one in the same process."""
    rank, size, sums = dist.get_rank(), dist.get_world_size(), []
    for number in range(2):
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/{number}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=HANG_SECONDS),
            device_id=device_id,
        )
        dist.barrier()  # else the first to leave closes connections that others still wait for
        sums.append(_hop_sums())
        world = dist.group.WORLD
        assert world is not None
        assert world.bound_device_id == device_id
    return sums


def test_a_new_world_has_new_groups(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(_again, str(tmp_path), None)
    assert results == [[sums, sums] for sums in ON_2X2]


@pytest.mark.skipif(torch.__version__ < "2.15", reason="before torch 2.15 gloo takes no device")
def test_a_world_that_is_bound_to_a_device(ranks: Ranks, tmp_path: Path) -> None:
    """torch would split its new groups off the world."""
    results = ranks.run(_again, str(tmp_path), torch.device("cpu:0"))
    assert results == [[sums, sums] for sums in ON_2X2]


def _own_groups_for_gradients() -> Any:
    """Whether gathers and reductions of a unit share their groups, as FSDP2 is told and told otherwise."""
    shared, losses = [], []
    serial = replace(CONFIGS["default"], overlap=False)  # lanes have groups of their own in any case
    for separate in (False, True):
        trainer = Trainer(None)
        trainer.zpp = zpp = zeropp.apply(trainer.net, serial)
        if separate:
            cast(FSDPModule, trainer.net).set_separate_reduce_scatter_group()
            trainer.zpp = zeropp.apply(trainer.net, serial)
            assert trainer.zpp is not zpp
            assert zeropp.apply(trainer.net, serial) is trainer.zpp
        comms = trainer.zpp.unit_comms[0].pair
        assert comms is not None
        weights, gradients = comms
        shared.append([hop.group for hop in weights.hops] == [hop.group for hop in gradients.hops[::-1]])
        losses.append([trainer.step() for _ in range(2)])
    assert trainer.zpp is not None
    return (
        shared,
        losses[0] == losses[1],
        {note for comms in trainer.zpp.unit_comms for note in remarks(comms)},
    )


def test_gradients_have_groups_of_their_own_if_fsdp2_was_asked_for_it(ranks: Ranks) -> None:
    expected = ([True, False], True, {"gradients in process groups of their own"})
    assert ranks.run(_own_groups_for_gradients) == [expected] * 4


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")
def test_nccl_groups_have_high_priority() -> None:
    """As far as it goes without a GPU: the options are accepted, and say what they should."""
    options = groups._options("cpu:gloo,cuda:nccl", timedelta(seconds=77))
    assert (options.is_high_priority_stream, options._timeout) == (True, timedelta(seconds=77))
    assert groups._options("cpu:gloo", timedelta(seconds=77)) is None
