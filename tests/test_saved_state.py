"""What a run keeps from step to step: checkpoints of it, and another Config in the middle."""

from __future__ import annotations

import logging
import logging.handlers
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils._pytree import tree_leaves

import zeropp
from tests.configs import CONFIGS
from tests.ranks import Ranks
from tests.training import Trainer

STEPS, STOP_AFTER = 4, 2


def _run(config: zeropp.Config, folder: str, stop_after: int | None, evaluate: bool) -> list[float]:
    """Losses of a run; it may stop, and go on with a new model, from files."""
    trainer = Trainer(config, micro_batches=2, accumulate_in_node=True)
    losses = []
    for step in range(STEPS):
        losses.append(trainer.step())
        if evaluate:
            losses.append(trainer.evaluate())
        if step + 1 == stop_after:
            trainer = _stop_and_go_on(trainer, Path(folder, f"{dist.get_rank()}.pt"))
    return losses


def _stop_and_go_on(trainer: Trainer, path: Path) -> Trainer:
    assert trainer.zpp is not None
    model, optimizer = get_state_dict(trainer.net, trainer.optimizer)
    torch.save({"model": model, "optimizer": optimizer, "zeropp": trainer.zpp.state_dict()}, path)
    again = Trainer(trainer.zpp.config, micro_batches=2, accumulate_in_node=True)
    again.step()  # other weights, and a history of its own
    again.data = trainer.data
    assert again.zpp is not None
    state = torch.load(path, weights_only=False)  # DTensors; zeropp's own part needs no pickle:
    torch.save(state["zeropp"], path)
    set_state_dict(
        again.net, again.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    again.zpp.load_state_dict(torch.load(path, weights_only=True))
    again.zpp.load_state_dict(again.zpp.state_dict())  # saved again before the first gather
    return again


@pytest.mark.parametrize("name", ["four_bit", "delta", "feedback", "default"])
@pytest.mark.parametrize("evaluate", [False, True])
def test_a_replayed_run_is_bit_identical(ranks: Ranks, tmp_path: Path, name: str, evaluate: bool) -> None:
    """Stopped right after a step, or with weights that an evaluation has already gathered."""
    config = CONFIGS[name]
    undisturbed = ranks.run(_run, config, str(tmp_path), None, evaluate)
    assert ranks.run(_run, config, str(tmp_path), STOP_AFTER, evaluate) == undisturbed
    assert len(set(undisturbed[0])) == len(undisturbed[0])


def _run_without_state(config: zeropp.Config) -> tuple[list[float], list[float]]:
    runs = []
    for restore in (True, False):
        trainer = Trainer(config)
        losses = [trainer.step() for _ in range(3)]
        assert trainer.zpp is not None
        state = trainer.zpp.state_dict()
        trainer.net.load_state_dict(trainer.net.state_dict())  # forgets what was kept
        if restore:
            trainer.zpp.load_state_dict(state)
        runs.append(losses + [trainer.step() for _ in range(3)])
    return runs[0], runs[1]


def test_without_the_state_a_run_goes_on_but_differs(ranks: Ranks) -> None:
    """Else the test above would show nothing."""
    for replayed, fresh in ranks.run(_run_without_state, CONFIGS["four_bit"]):
        assert replayed[:3] == fresh[:3]
        assert replayed != fresh
        assert replayed == pytest.approx(fresh, rel=0.01)


def _wrong_state() -> list[tuple[bool, str, list[float]]]:
    """What is said of states that cannot be used on every rank, and the losses after them."""
    log = logging.handlers.MemoryHandler(100)
    logging.getLogger("zeropp").addHandler(log)
    found = []
    for what in (
        "right",
        "other world",
        "no units",
        "other rank",
        "missing on rank 2",
        "other groups",
        "version",
    ):
        trainer = Trainer(CONFIGS["four_bit"])
        zpp = trainer.zpp
        assert zpp is not None
        trainer.step()
        state: dict[str, Any] | None = zpp.state_dict()
        assert state is not None
        change: dict[str, dict[str, Any]] = {
            "other world": {"world_size": 8},
            "no units": {"units": {}},
            "other rank": {"rank": 7},
            "version": {"version": 2},
        }
        state |= change.get(what, {})
        if what == "other groups":
            state["units"]["blocks.0"]["references"] *= 2
        if what == "missing on rank 2" and dist.get_rank() == 2:
            state = None
        log.buffer.clear()
        used = zpp.load_state_dict(state)
        said = " ".join(record.getMessage() for record in log.buffer)
        found.append((used, said, [trainer.step() for _ in range(2)]))
    logging.getLogger("zeropp").removeHandler(log)
    return found


def test_a_state_that_some_rank_cannot_use_is_used_on_none(ranks: Ranks) -> None:
    results = ranks.run(_wrong_state)
    for right, world, units, rank, missing, groups, version in results:
        assert right[:2] == (True, "")
        assert "ranks [0, 1, 2, 3] (rank 0: it is of {'version': 3, 'rank': 0, 'world_size': 8}" in world[1]
        assert "{'version': 2, 'rank': 0" in version[1]
        assert "units []; expected" in units[1]
        assert "'rank': 7" in rank[1]
        assert "ranks [2] (rank 2: there is none)" in missing[1]
        assert "unit 'blocks.0' has 2 groups of weights, expected 1" in groups[1]
        for used, _, losses in (world, units, rank, missing, groups, version):
            assert not used
            assert losses == pytest.approx(right[2], rel=0.01)
    assert all(result[4][2] == results[0][4][2] for result in results)  # all sent anew, none by differences


def _loaded_into(config: zeropp.Config) -> tuple[bool, bool, str]:
    """The state of four_bit() in another Config: whether it is used, if there are errors, what is said."""
    log = logging.handlers.MemoryHandler(100)
    logging.getLogger("zeropp").addHandler(log)
    saved = Trainer(CONFIGS["four_bit"])
    saved.step()
    other = Trainer(config)
    assert saved.zpp is not None
    assert other.zpp is not None
    log.buffer.clear()
    used = other.zpp.load_state_dict(saved.zpp.state_dict())
    logging.getLogger("zeropp").removeHandler(log)
    feedbacks = [pair.reduce_scatter.feedback for pair in other.zpp._pairs]
    has_errors = any(feedback and feedback.kept for feedback in feedbacks)
    return used, has_errors, " ".join(record.getMessage() for record in log.buffer)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rotate": False}, "stored errors of another Config: rotates True, expected False"),
        ({"block_size": 64}, "weights of another Config: block_size 128, expected 64"),
        (
            {"gradients_across": "int8"},
            "stored errors of another Config: gradients_across 'int4', expected 'int8'",
        ),
    ],
)
def test_a_state_of_another_config_is_never_mixed_in(ranks: Ranks, change: Any, says: str) -> None:
    for used, has_errors, said in ranks.run(_loaded_into, zeropp.Config.four_bit(node_size=2, **change)):
        assert not used
        assert not has_errors
        assert says in said
    for used, has_errors, said in ranks.run(_loaded_into, CONFIGS["four_bit"]):
        assert (used, has_errors, said) == (True, True, "")


def _schedule() -> dict[str, Any]:
    """16-bit gradients at first, four bits later, and back."""
    start = zeropp.Config(gradients_in_node="bf16", gradients_across="bf16", node_size=2)
    trainer = Trainer(start)
    zpp = trainer.zpp
    assert zpp is not None
    sent, losses = [], []
    for config in (start, CONFIGS["default"], CONFIGS["four_bit"], CONFIGS["four_bit"], start):
        zpp.set_config(config)
        zpp.ledger.reset()
        losses.append(trainer.step())
        across = [
            zpp.ledger.total(collective=kind, hop="across") for kind in ("all_gather", "reduce_scatter")
        ]
        sent.append([traffic.wire_bytes for traffic in across])
    plain = Trainer(None)
    return {"sent": sent, "losses": losses, "plain": [plain.step() for _ in range(5)], "config": zpp.config}


def test_a_schedule(ranks: Ranks) -> None:
    for result in ranks.run(_schedule):
        weights, gradients = zip(*result["sent"], strict=True)
        assert gradients[0] == gradients[4] > 2 * gradients[1] == 2 * gradients[2] > 0
        assert weights[0] == weights[1]
        assert weights[2] > weights[0] > 1.5 * weights[3]  # all of it in 16 bits, then differences
        assert result["losses"] == pytest.approx(result["plain"], rel=0.01)


def _kept_state() -> tuple[bool, bool, bool]:
    """What survives set_config: node shards and errors that mean the same."""
    trainer = Trainer(CONFIGS["four_bit"])
    zpp = trainer.zpp
    assert zpp is not None
    trainer.step()
    trainer.evaluate()
    before = [comms.pair for comms in zpp.unit_comms]
    zpp.set_config(zeropp.Config.four_bit(node_size=2, rounding="stochastic"))
    same_errors = all(
        new.pair.reduce_scatter.feedback is old.reduce_scatter.feedback
        and new.pair.all_gather.node_shards == old.all_gather.node_shards
        for new, old in zip(zpp.unit_comms, before, strict=True)
        if new.pair is not None and old is not None
    )
    zpp.ledger.reset()
    trainer.evaluate()
    sent_nothing = zpp.ledger.total(hop="across").calls == 0
    zpp.set_config(zeropp.Config.four_bit(node_size=2, rotate=False))
    forgotten = not any(
        pair.reduce_scatter.feedback.kept for pair in zpp._pairs if pair.reduce_scatter.feedback
    )
    return same_errors, sent_nothing, forgotten


def test_what_survives_another_config(ranks: Ranks) -> None:
    assert ranks.run(_kept_state) == [(True, True, True)] * 4


def _refused() -> list[str]:
    trainer = Trainer(CONFIGS["default"], micro_batches=1, accumulate_in_node=True)
    zpp = trainer.zpp
    assert zpp is not None
    messages = []
    with pytest.raises(TypeError) as wrong_type:
        zpp.set_config("int8")  # type: ignore[arg-type]
    messages.append(str(wrong_type.value))
    with pytest.raises(ValueError, match="match no unit"):
        zpp.set_config(CONFIGS["default"], overrides={"layers.*": CONFIGS["paper"]})
    trainer.micro_batches = 2
    zpp.set_requires_cross_node_sync(False)
    trainer.accumulate_in_node = False
    trainer.backward()
    with pytest.raises(RuntimeError) as pending:
        zpp.set_config(CONFIGS["paper"])
    messages.append(str(pending.value))
    assert zpp.config == CONFIGS["default"]
    zpp.drop_pending_gradients()
    zpp.remove()
    with pytest.raises(RuntimeError, match="set_config after remove"):
        zpp.set_config(CONFIGS["paper"])
    return messages


def test_a_bad_change_is_refused_and_changes_nothing(ranks: Ranks) -> None:
    for wrong_type, pending in ranks.run(_refused):
        assert wrong_type == "config is 'int8'; expected a zeropp.Config"
        assert "still pending without cross-node sync" in pending


def _tensors(state: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def _copies() -> tuple[int, bool, bool]:
    """Whether what state_dict handed out, or load_state_dict took, changes with the next step."""
    trainer = Trainer(CONFIGS["four_bit"])
    zpp = trainer.zpp
    assert zpp is not None
    trainer.step()
    state = zpp.state_dict()
    before = [tensor.clone() for tensor in _tensors(state)]
    trainer.step()
    kept = all(torch.equal(a, b) for a, b in zip(before, _tensors(state), strict=True))
    zpp.load_state_dict(state)
    again = zpp.state_dict()
    trainer.step()
    untouched = all(torch.equal(a, b) for a, b in zip(before, _tensors(state), strict=True))
    same = all(torch.equal(a, b) for a, b in zip(before, _tensors(again), strict=True))
    return len(before), kept, untouched and same


def test_a_state_is_a_copy(ranks: Ranks) -> None:
    for count, kept, untouched in ranks.run(_copies):
        assert count >= 3 * 3  # of each unit: a row of the reference, its fingerprint, kept errors
        assert kept
        assert untouched


def _misfits() -> tuple[list[str], bool]:
    """States that do not fit: what is logged, and whether the last one is used."""
    log = logging.handlers.BufferingHandler(1000)
    logging.getLogger("zeropp").addHandler(log)
    trainer = Trainer(CONFIGS["four_bit"])
    zpp = trainer.zpp
    assert zpp is not None
    trainer.step()
    state = zpp.state_dict()
    zpp.set_config(CONFIGS["default"])
    zpp.load_state_dict(state)
    zpp.set_config(CONFIGS["four_bit"])
    zpp.load_state_dict(state)
    for unit in state["units"].values():
        unit["errors"] = {chunk: kept[:, :-1].clone() for chunk, kept in unit["errors"].items()}
    zpp.load_state_dict(state)
    trainer.step()
    trainer.step()
    for unit in state["units"].values():
        for group in unit["references"]:
            group["rows"] = [row[:-2].clone() for row in group["rows"]]
    used = zpp.load_state_dict(state)
    trainer.step()
    logging.getLogger("zeropp").removeHandler(log)
    return [record.getMessage() for record in log.buffer], used


def test_a_state_that_does_not_fit_is_not_dropped_without_a_word(ranks: Ranks) -> None:
    for rank, (messages, used) in enumerate(ranks.run(_misfits)):
        text = "\n".join(messages)
        assert text.count("saved state of units (root), blocks.0, blocks.1 is dropped") == (rank == 0)
        assert text.count("do not fit") == 3  # once for each unit
        assert "has a reference of" in text
        assert not used
