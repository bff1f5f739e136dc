"""Checkpoints on real files, by real ranks."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ranks import RankError, Ranks
from tests.tools.train.runs import small_run, train_here
from zeropp.tools.train.checkpoint import (
    CheckpointError,
    Checkpoints,
    MetadataUnpickler,
    read_state,
    steps_in,
)
from zeropp.tools.train.world import World


def tensors_of(world: World, factor: float) -> dict[str, Any]:
    """10 rows over the ranks. 4 and 3 ranks get unequal shards."""
    whole = torch.arange(10, dtype=torch.float32) * factor
    return {"model": {"weight": distribute_tensor(whole, world.mesh, [Shard(0)])}}


def save_some(folder: Path, steps: Sequence[int], keep: int) -> list[int]:
    world = World.current()
    checkpoints = Checkpoints(folder, keep, world)
    for step in steps:
        tensors = tensors_of(world, float(step))
        checkpoints.save(step, tensors, {"note": step})
        tensors["model"]["weight"].to_local().fill_(-1.0)  # `save` has copied it
    checkpoints.wait()
    torch.distributed.barrier()
    return sorted(steps_in(folder))


def load_last(folder: Path) -> tuple[str, list[float]]:
    world = World.current()
    checkpoints = Checkpoints(folder, 1, world)
    path = checkpoints.last()
    assert path is not None
    tensors = tensors_of(world, 0.0)
    checkpoints.load(path, tensors)
    return path.name, tensors["model"]["weight"].full_tensor().tolist()


def test_the_last_checkpoints_load_on_any_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(save_some, tmp_path, (3, 6, 9, 12), 2, world=4) == [[9, 12]] * 4
    assert read_state(tmp_path / "step-00000012") == {"format": 1, "step": 12, "note": 12}
    expected = ("step-00000012", [12.0 * n for n in range(10)])
    for world in (4, 3, 1):
        assert ranks.run(load_last, tmp_path, world=world) == [expected] * world


def die_while_writing(folder: Path) -> None:
    """All ranks die while some of them write the second checkpoint."""
    world = World.current()
    checkpoints = Checkpoints(folder, 1, world)
    checkpoints.save(1, tensors_of(world, 1.0), {})
    checkpoints.wait()
    torch.distributed.barrier()
    if world.rank < 2:  # it cannot complete without the other ranks
        checkpoints.save(2, tensors_of(world, 2.0), {})
    while not list(folder.glob("*.partial")):
        time.sleep(0.01)
    os._exit(9)


def test_a_crash_while_writing_leaves_the_previous_one_whole(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="ended with exit code 9"):
        ranks.run(die_while_writing, tmp_path)
    assert [path.name for path in tmp_path.glob("*.partial")] == ["step-00000002.partial"]
    assert ranks.run(load_last, tmp_path, world=4)[0] == ("step-00000001", [float(n) for n in range(10)])
    assert not list(tmp_path.glob("*.partial"))


def save_to_a_file(folder: Path) -> str:
    world = World.current()
    checkpoints = Checkpoints(folder, 1, world)
    if world.is_first:
        (folder / "step-00000001.partial").mkdir()
        (folder / "step-00000001.partial" / "__1_0.distcp").mkdir()  # rank 1 cannot write its file
    torch.distributed.barrier()
    checkpoints.save(1, tensors_of(world, 1.0), {})
    with pytest.raises(CheckpointError) as error:
        checkpoints.wait()
    assert not steps_in(folder)
    return str(error.value)


def test_a_file_that_cannot_be_written_is_an_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks.run(save_to_a_file, tmp_path, world=2):
        assert "step-00000001 could not be written: " in message
        assert message.endswith("Is a directory. Older checkpoints are complete")


def test_a_checkpoint_has_only_tensors_and_json(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(train_here, small_run(tmp_path, steps=2), world=2)
    folder = tmp_path / "checkpoints" / "step-00000002"
    with (folder / ".metadata").open("rb") as file:
        metadata = MetadataUnpickler(file).load()
    kinds = {type(entry) for entry in metadata.state_dict_metadata.values()}
    assert kinds == {TensorStorageMetadata}
    names = metadata.state_dict_metadata
    assert "model.blocks.0.attention.query.weight" in names
    assert "optimizer.blocks.0.attention.query.weight.exp_avg_sq" in names
    assert sorted(p.name for p in folder.iterdir()) == [
        ".metadata", "__0_0.distcp", "__1_0.distcp", "state.json"
    ]  # fmt: skip


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("owned",))


def load_evil(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load_last(folder)
    return str(error.value)


def test_code_in_a_checkpoint_is_refused(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.run(save_some, tmp_path, (1,), 1, world=2)
    for index in (Evil(), {"storage": Evil()}, 3):
        (tmp_path / "step-00000001" / ".metadata").write_bytes(pickle.dumps(index))
        message = ranks.run(load_evil, tmp_path, world=2)[0]
        assert "cannot be read: .metadata is damaged: it " in message
        assert ("contains posix.mkdir" in message) == (index != 3)
    assert not Path("owned").exists()


def test_folders_that_are_not_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint of zeropp train"):
        read_state(tmp_path)
    (tmp_path / "state.json").write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match="has another format than 1"):
        read_state(tmp_path)
