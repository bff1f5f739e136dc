"""Weights changed by other means than an optimizer: noticed on all ranks alike, or an error, never silent.

On devices with streams a check is not read where it is made. `at_once = False` does the same on CPU, without
overlap: where there are streams there are no lanes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict_loader as dcp_loader
import torch.distributed.checkpoint.state_dict_saver as dcp_saver
from torch import nn

import zeropp
from tests.ranks import Ranks
from tests.training import Trainer, local, loss_of, make_net
from zeropp.fsdp2.units import find_units


def _trainer(secondary: bool, **changes: Any) -> Trainer:
    trainer = Trainer(zeropp.Config(node_size=2, secondary=secondary, overlap=False, **changes))
    assert trainer.zpp is not None
    trainer.zpp._context.alarm.at_once = False
    return trainer


def hand_written_sgd(net: nn.Module) -> None:
    with torch.no_grad():
        for p in net.parameters():
            assert p.grad is not None
            p.sub_(0.5 * p.grad)


class _Sgd:
    """An optimizer that is no torch.optim.Optimizer."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)

    @torch.no_grad()
    def step(self) -> None:
        for p in self.params:
            p.add_(p.grad, alpha=-0.5)


def foreign_optimizer(net: nn.Module) -> None:
    _Sgd(net.parameters()).step()


def load_into_parameters(net: nn.Module) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(p * 0.5)


def load_into_state_dict(net: nn.Module) -> None:
    for tensor in net.state_dict().values():
        tensor.copy_(tensor * 0.5)


def average(net: nn.Module) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p.lerp_(torch.zeros_like(p), 0.5)


def one_element(net: Any) -> None:
    """Changes a weight that three of the ranks have no part of."""
    with torch.no_grad():
        net.blocks[1].gate.mul_(0.5)


def merge_adapter(net: nn.Module) -> None:
    for p in net.parameters():
        p.data += torch.ones_like(p.data)


def foreach(net: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(net.parameters()), 0.5)


def local_edit(net: nn.Module) -> None:
    with torch.no_grad():
        for p in net.parameters():
            local(p).mul_(0.5)


NOTICED = [
    hand_written_sgd,
    foreign_optimizer,
    load_into_parameters,
    load_into_state_dict,
    average,
    one_element,
]
UNNOTICED = [merge_adapter, foreach, local_edit]


def _change(change: Callable[[Any], None], net: Any) -> None:
    """Change the sharded parameters: after an evaluation those of the root are still gathered."""
    net.reshard()
    change(net)


def _change_and_evaluate(changes: list[Callable[[Any], None]], weights: Any) -> list[tuple[float, ...]]:
    """For each change, losses: before; after, with the node shard; after, without."""
    losses = []
    for change in changes:
        after = []
        for secondary in (True, False):
            # Direct int8 weights mean the same with and without a node shard; differences need one.
            trainer = _trainer(True, weights=weights) if secondary else _trainer(False)
            trainer.step()
            trainer.backward()
            before = trainer.evaluate()
            _change(change, trainer.net)
            after.append(trainer.evaluate())
            assert trainer.zpp is not None
            trainer.zpp.summary()  # nothing that was not raised
        losses.append((before, *after))
    return losses


def test_operations_on_parameters_are_noticed(ranks: Ranks) -> None:
    for losses in ranks.run(_change_and_evaluate, NOTICED, "int8"):
        for before, kept, not_kept in losses:
            assert kept == not_kept != before


def test_a_load_after_a_step_is_sent_whole_with_differences(ranks: Ranks) -> None:
    """Not as a difference in four bits, which would be far off after a large change."""
    for losses in ranks.run(_change_and_evaluate, [load_into_parameters], "delta-int4"):
        for before, kept, not_kept in losses:
            assert abs(kept - not_kept) < abs(before - not_kept) / 100


def _errors_after(changes: list[Callable[[Any], None]]) -> list[str]:
    errors = []
    for change in changes:
        trainer = _trainer(True)
        trainer.step()
        trainer.evaluate()
        _change(change, trainer.net)
        errors.append(_error_of(trainer.evaluate))
    return errors


def _error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except zeropp.StaleWeightsError as error:
        return str(error)
    return ""


def test_any_other_change_is_an_error_in_the_same_evaluation(ranks: Ranks) -> None:
    """No optimizer is needed for it: the next gather of any unit raises."""
    for errors in ranks.run(_errors_after, UNNOTICED):
        assert all("weights of unit '(root)' changed" in error for error in errors)


def _go_on_after_an_error(overlap: bool) -> list[tuple[float, float]]:
    """For a change in the whole net and in each block, losses after the error and `invalidate()`: with the
    node shard, and without."""
    losses = []
    for blocks in (slice(0), slice(1), slice(1, 2)):
        after = []
        for secondary in (True, False):
            config = zeropp.Config(node_size=2, secondary=secondary, overlap=overlap)
            trainer = Trainer(config)
            assert trainer.zpp is not None
            trainer.step()
            trainer.evaluate()
            trainer.net.reshard()  # type: ignore[operator]
            for part in trainer.net.blocks[blocks] or [trainer.net]:
                local_edit(part)
            assert bool(_error_of(trainer.evaluate)) == secondary
            trainer.zpp.invalidate()
            after.append(trainer.evaluate())
        losses.append((after[0], after[1]))
    return losses


@pytest.mark.parametrize("overlap", [True, False])
def test_after_the_error_and_invalidate_training_can_go_on(ranks: Ranks, overlap: bool) -> None:
    """What was gathered, or on its way, when the error was raised is never computed with."""
    for losses in ranks.run(_go_on_after_an_error, overlap):
        assert all(kept == not_kept for kept, not_kept in losses), losses


def _dcp_load(folder: Path) -> str:
    trainer = _trainer(True)
    dcp_saver.save({"net": trainer.net.state_dict()}, checkpoint_id=folder)
    trainer.step()
    trainer.evaluate()
    trainer.net.reshard()  # type: ignore[operator]
    dcp_loader.load({"net": trainer.net.state_dict()}, checkpoint_id=folder)
    return _error_of(trainer.evaluate)


def test_a_distributed_checkpoint_loaded_into_the_tensors_is_an_error(ranks: Ranks, tmp_path: Path) -> None:
    assert all("call invalidate() on every rank" in error for error in ranks.run(_dcp_load, tmp_path / "c"))


def _last_unit() -> dict[str, str]:
    """A change in the unit that is gathered last: nothing comes after it in the evaluation."""
    errors = {}
    for action in ("evaluate", "step", "summary", "state_dict", "remove"):
        trainer = _trainer(True)
        assert trainer.zpp is not None
        trainer.step()
        trainer.evaluate()
        local_edit(trainer.net.blocks[1])
        assert _error_of(trainer.evaluate) == ""
        act: Any = getattr(trainer.zpp, action, None) or getattr(trainer, action)
        errors[action] = _error_of(act)
        assert _error_of(trainer.zpp.remove) == ""  # said once
    return errors


def test_the_last_unit_raises_at_the_next_call(ranks: Ranks) -> None:
    for errors in ranks.run(_last_unit):
        assert all("weights of unit 'blocks.1' changed" in error for error in errors.values()), errors


def _teacher(steps: int) -> tuple[list[float], list[float]]:
    """The losses of an average of the student's weights, with a node shard and without."""
    losses = []
    for secondary in (True, False):
        student, teacher = _trainer(secondary), make_net(seed=3).requires_grad_(False)
        zpp = zeropp.apply(teacher, zeropp.Config(node_size=2, secondary=secondary))
        zpp._context.alarm.at_once = False
        own = []
        for _ in range(steps):
            student.step()
            teacher.reshard()  # type: ignore[operator]  # its root is still gathered
            with torch.no_grad():
                for mine, theirs in zip(teacher.parameters(), student.net.parameters(), strict=True):
                    mine.mul_(0.5).add_(theirs, alpha=0.5)
                own.append(loss_of(teacher, torch.zeros(2, 3, dtype=torch.long)).item())
        losses.append(own)
    return losses[0], losses[1]


def test_a_teacher_follows_its_student(ranks: Ranks) -> None:
    for kept, not_kept in ranks.run(_teacher, 4):
        assert kept == not_kept
        assert len(set(kept)) == 4


def _versions() -> list[bool]:
    net = make_net()
    unit = find_units(net)[-1]
    moved = []
    for change in (one_element, average, merge_adapter, foreach):
        before = unit.version()
        change(net)
        moved.append(unit.version() != before)
    return moved


def test_which_changes_all_ranks_see_alike(ranks: Ranks) -> None:
    assert ranks.run(_versions) == [[True, True, False, False]] * 4
