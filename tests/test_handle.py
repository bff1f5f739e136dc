"""apply() and what it returns: errors, overrides, removal, lifetime, and what may not go unseen."""

from __future__ import annotations

import gc
import logging
import logging.handlers
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.ranks import Ranks
from tests.training import Trainer, batches, local, loss_of, make_net
from zeropp.fsdp2.optimizer_hooks import watching

ON_2X2 = zeropp.Config(node_size=2)


def comm_types(net: Any) -> set[str]:
    groups = [g for m in (net, *net.blocks) for g in m._get_fsdp_state()._fsdp_param_groups]
    return {type(group._all_gather_comm).__name__ for group in groups}


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_apply_before_init_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\)"):
        zeropp.apply(nn.Linear(2, 2))


def _bad_inputs() -> dict[str, str]:
    net, before = make_net(), len(watching())  # a thread of the job before may still hold one
    errors = {
        "unsharded": error_of(zeropp.apply, nn.Linear(2, 2)),
        "no config": error_of(zeropp.apply, net, "int8"),
        "no override": error_of(zeropp.apply, net, overrides={"head": "int8"}),
        "undividing": error_of(zeropp.apply, net, zeropp.Config(node_size=3)),
        "unmatched": error_of(zeropp.apply, net, ON_2X2, overrides={"layers.*": zeropp.Config.wire16()}),
        "late": error_of(zeropp.apply, net, ON_2X2, overrides={"blocks.1": zeropp.Config(node_size=3)}),
    }
    assert comm_types(net) == {"DefaultAllGather"}  # nothing was half applied
    assert len(watching()) <= before
    return errors


def test_bad_input_is_named_and_nothing_is_applied(ranks: Ranks) -> None:
    for errors in ranks.run(_bad_inputs):
        assert "ValueError: Linear has no parameters sharded by FSDP2; call" in errors["unsharded"]
        assert errors["no config"] == "TypeError: config is 'int8'; expected a zeropp.Config or 'auto'"
        assert errors["no override"] == "TypeError: overrides['head'] is 'int8'; expected a zeropp.Config"
        assert "Config.node_size is 3, which does not divide the 4 ranks" in errors["undividing"]
        assert "match no unit: ['layers.*']; the units are ['(root)', 'blocks.0'" in errors["unmatched"]
        assert "Config.node_size is 3" in errors["late"]


def _overridden() -> tuple[str, dict[str, Any]]:
    net = make_net()
    overrides = {"blocks.0": zeropp.Config.wire16(node_size=2), "blocks.*": zeropp.Config.paper(node_size=2)}
    zpp = zeropp.apply(net, ON_2X2, overrides=overrides)
    loss_of(net, next(batches())).backward()  # type: ignore[no-untyped-call]
    hops = {(key.unit, key.hop) for key, _ in zpp.ledger.rows()}
    return zpp.summary(), {
        "configs": {comms.unit.name: comms.config for comms in zpp.unit_comms},
        "hops": hops,
    }


def test_overrides_by_name_first_match_counts(ranks: Ranks) -> None:
    summary, found = ranks.run(_overridden)[0]
    assert found["configs"] == {
        "(root)": ON_2X2,
        "blocks.0": zeropp.Config.wire16(node_size=2),
        "blocks.1": zeropp.Config.paper(node_size=2),
    }
    assert {hop for unit, hop in found["hops"] if unit == "blocks.0"} == {"flat"}
    assert {hop for unit, hop in found["hops"] if unit == "blocks.1"} == {"across", "in-node"}
    rows = {line.split("│")[1].strip(): line for line in summary.splitlines() if "│" in line}
    assert "bf16 flat" in rows["blocks.0"]
    assert "int8 across -> int8 in-node" in rows["blocks.1"]
    assert "int4 in-node -> int4 across" in rows["blocks.1"]
    assert "int8 in-node -> int4 across" in rows["(root)"]
    assert "2 nodes x 2 ranks" in rows["(root)"]


def _apply_again() -> None:
    net = make_net()
    load_hooks = [len(m._load_state_dict_post_hooks) for m in net.modules()]
    first = zeropp.apply(net, ON_2X2)
    assert zeropp.apply(net, ON_2X2) is first
    assert len(watching()) == 1
    second = zeropp.apply(net, zeropp.Config.paper(node_size=2))
    assert second is not first
    assert len(watching()) == 1
    assert "removed" in first.summary()
    assert "already applied to another module" in error_of(zeropp.apply, net.blocks[0], ON_2X2)
    second.remove()
    second.remove()
    assert comm_types(net) == {"DefaultAllGather"}
    assert not watching()
    assert [len(m._load_state_dict_post_hooks) for m in net.modules()] == load_hooks
    part = zeropp.apply(net.blocks[0], ON_2X2)
    assert "already applied to another module" in error_of(zeropp.apply, net, ON_2X2)
    other = zeropp.apply(net.blocks[1], ON_2X2)
    assert {comms.unit.name for comms in part.unit_comms + other.unit_comms} == {"(root)"}


def test_apply_twice_replace_remove_and_parts(ranks: Ranks) -> None:
    ranks.run(_apply_again)


def _train_and_remove() -> tuple[list[float], list[float]]:
    plain, ours = Trainer(None), Trainer(ON_2X2)
    assert ours.zpp is not None
    ours.zpp.remove()
    return [plain.step() for _ in range(3)], [ours.step() for _ in range(3)]


def test_after_remove_it_is_plain_fsdp2_again(ranks: Ranks) -> None:
    for plain, ours in ranks.run(_train_and_remove):
        assert plain == ours


def _memory() -> list[int]:
    trainer = Trainer(ON_2X2)
    zpp = trainer.zpp
    assert zpp is not None
    sizes = [zpp.communication_bytes]
    trainer.step()
    sizes.append(zpp.communication_bytes)
    zpp.set_requires_cross_node_sync(False)
    trainer.backward()
    sizes.append(zpp.communication_bytes)
    zpp.drop_pending_gradients()
    sizes.append(zpp.communication_bytes)
    return sizes


def test_memory_is_told(ranks: Ranks) -> None:
    for before, stepped, pending, dropped in ranks.run(_memory):
        assert 0 == before < stepped < pending
        assert stepped <= dropped < pending  # scratch may have grown, pending gradients are gone


def _lifetime() -> None:
    net = make_net()
    zpp = zeropp.apply(net, ON_2X2)
    loss_of(net, next(batches())).backward()  # type: ignore[no-untyped-call]
    gone = weakref.ref(zpp)
    assert watching()
    del zpp
    gc.collect()
    assert gone() is not None  # the model still needs it
    del net
    gc.collect()
    assert gone() is None
    assert not watching()


def test_everything_goes_with_the_model(ranks: Ranks) -> None:
    ranks.run(_lifetime)


def _two_models() -> tuple[list[float], list[float], dict[str, int]]:
    """Fault 7: a second model in one process. Each alone, then both, in turns."""
    alone = [Trainer(ON_2X2, net=make_net(seed)) for seed in (0, 1)]
    expected = [[trainer.step() for _ in range(3)] for trainer in alone]
    together = [Trainer(ON_2X2, net=make_net(seed)) for seed in (0, 1)]
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    found: list[list[float]] = [[], []]
    for _ in range(3):
        for losses, trainer in zip(found, together, strict=True):
            losses.append(trainer.step())
    assert len(groups) == before  # hop groups are shared
    assert together[0].zpp is not None
    calls = together[0].zpp.ledger.total(unit="blocks.0", collective="all_gather", hop="across").calls
    return expected[0] + expected[1], found[0] + found[1], {"across": calls}


def test_two_models_in_one_process(ranks: Ranks) -> None:
    for expected, found, calls in ranks.run(_two_models):
        assert expected == found
        assert calls == {"across": 3}  # the other model's optimizer does not count


def _log_records() -> list[tuple[str, str]]:
    handler = logging.handlers.BufferingHandler(capacity=1000)
    logger = logging.getLogger("zeropp")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        net = make_net()
        zeropp.apply(net, ON_2X2)
        zeropp.apply(net, zeropp.Config.wire16(node_size=2))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return [(record.levelname, record.getMessage()) for record in handler.buffer]


def test_the_log_says_what_each_unit_sends(ranks: Ranks) -> None:
    first, *others = ranks.run(_log_records)
    assert (
        "INFO",
        "zeropp: 3 units, (root), blocks.0, blocks.1: 2 nodes x 2 ranks: weights int8 across -> int8 "
        "in-node, gradients int8 in-node -> int4 across, rotated.",
    ) in first
    assert [level for level, _ in first] == ["INFO"] * 2
    assert others == [[], [], []]


def _log_on_one_node() -> list[str]:
    handler = logging.handlers.BufferingHandler(capacity=1000)
    logging.getLogger("zeropp").addHandler(handler)
    for config in (zeropp.Config(node_size=4), zeropp.Config.off(node_size=4), ON_2X2):
        zeropp.apply(make_net(), config)
    logging.getLogger("zeropp").removeHandler(handler)
    return [record.getMessage() for record in handler.buffer]


def test_the_log_says_that_there_is_one_node(ranks: Ranks) -> None:
    """Not of plain FSDP2, which was asked for."""
    (said,), *others = ranks.run(_log_on_one_node)
    assert "all ranks are on one node: nothing crosses nodes" in said
    assert others == [[], [], []]


def _edits() -> dict[str, str]:
    errors = {}

    def forward_after(change: Any) -> str:
        trainer = Trainer(ON_2X2)
        trainer.step()
        trainer.evaluate()
        block: Any = trainer.net.blocks[0]
        change(block)
        return error_of(trainer.evaluate)

    def no_grad_edit(block: Any) -> None:
        with torch.no_grad():
            for p in block.parameters():
                local(p).mul_(0.5)

    def data_edit(block: Any) -> None:
        for p in block.parameters():
            local(p.data)[:] = 0.25

    def load_straight_into_the_tensors(block: Any) -> None:
        for tensor in block.state_dict().values():
            local(tensor).copy_(torch.ones_like(local(tensor)))

    def load_state_dict(block: Any) -> None:
        block.load_state_dict({name: tensor * 0.5 for name, tensor in block.state_dict().items()})

    def load_part(block: Any) -> None:
        block.up.load_state_dict({name: tensor * 0.5 for name, tensor in block.up.state_dict().items()})

    for change in (no_grad_edit, data_edit, load_straight_into_the_tensors, load_state_dict, load_part):
        errors[change.__name__] = forward_after(change)
    return errors


def test_weights_changed_behind_our_back_are_an_error(ranks: Ranks) -> None:
    """Fault 6: stale secondary weights."""
    for errors in ranks.run(_edits):
        for change in ("no_grad_edit", "data_edit", "load_straight_into_the_tensors"):
            assert "StaleWeightsError: the weights of unit 'blocks.0' changed" in errors[change]
        assert errors["load_state_dict"] == errors["load_part"] == "no error"


def _edit_and_tell() -> tuple[float, float]:
    losses = []
    for secondary in (True, False):
        trainer = Trainer(zeropp.Config(node_size=2, secondary=secondary))
        trainer.step()
        trainer.evaluate()
        with torch.no_grad():
            for p in trainer.net.blocks[0].parameters():
                local(p).mul_(0.5)
        assert trainer.zpp is not None
        trainer.zpp.invalidate()
        losses.append(trainer.evaluate())
    return losses[0], losses[1]


def test_invalidate_makes_an_edit_known(ranks: Ranks) -> None:
    for kept, not_kept in ranks.run(_edit_and_tell):
        assert kept == not_kept


def _forgotten_sync() -> dict[str, str]:
    trainer = Trainer(ON_2X2)
    zpp = trainer.zpp
    assert zpp is not None
    trainer.step()
    zpp.set_requires_cross_node_sync(False)
    trainer.backward()
    before = [local(p).clone() for p in trainer.net.parameters()]
    errors = {"step": error_of(trainer.optimizer.step), "remove": error_of(zpp.remove)}
    assert all(torch.equal(a, local(b)) for a, b in zip(before, trainer.net.parameters(), strict=True))
    zpp.set_requires_cross_node_sync(True)
    errors["still pending"] = error_of(trainer.optimizer.step)
    trainer.backward()
    errors["after sync"] = error_of(trainer.optimizer.step)
    zpp.set_requires_cross_node_sync(False)
    trainer.backward()
    zpp.drop_pending_gradients()
    errors["dropped"] = error_of(zpp.remove)
    return errors


def test_forgetting_to_sync_is_an_error(ranks: Ranks) -> None:
    for errors in ranks.run(_forgotten_sync):
        for action in ("step", "still pending"):
            assert "set_requires_cross_node_sync(True) before the backward" in errors[action]
        assert "still pending without cross-node sync" in errors["remove"]
        assert errors["after sync"] == errors["dropped"] == "no error"


def _exact_losses() -> tuple[float, float, float]:
    """Losses of decoded weights, of exact ones, and of what plain FSDP2 gathers; after an evaluation of the
    ones or the others, in which the root stays gathered."""
    trainer = Trainer(zeropp.Config(node_size=2))
    assert trainer.zpp is not None
    trainer.step()
    decoded = trainer.evaluate()
    with trainer.zpp.exact_weights():
        exact = trainer.evaluate()
        assert trainer.evaluate() == exact
    assert trainer.evaluate() == decoded
    trainer.zpp.remove()
    return decoded, exact, trainer.evaluate()


def test_exact_weights_are_those_of_a_checkpoint_whatever_was_evaluated_before(ranks: Ranks) -> None:
    for decoded, exact, plain in ranks.run(_exact_losses):
        assert exact == plain != decoded


def _zero_grad_in_between() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    exact = zeropp.Config(gradients_in_node="none", gradients_across="none", node_size=2)
    disturbed, plain = Trainer(exact), Trainer(exact)
    assert disturbed.zpp is not None
    disturbed.zpp.set_requires_cross_node_sync(False)
    disturbed.backward()
    disturbed.optimizer.zero_grad()  # a bad batch: start over
    disturbed.zpp.set_requires_cross_node_sync(True)
    disturbed.data, plain.data = batches(7), batches(7)
    disturbed.backward()
    plain.backward()
    return disturbed.local_gradients(), plain.local_gradients()


def test_zero_grad_drops_what_is_pending(ranks: Ranks) -> None:
    for disturbed, plain in ranks.run(_zero_grad_in_between):
        assert all(torch.equal(disturbed[name], plain[name]) for name in plain)


class _Switch(nn.Module):
    """Uses one of two layers of equal size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        out: torch.Tensor = self.layers[which](self.layers[2](x))
        return out


def _switching() -> tuple[list[Any], list[Any]]:
    from torch.distributed.fsdp import fully_shard

    exact = zeropp.Config(weights="none", gradients_in_node="none", gradients_across="none", node_size=2)
    gradients: list[list[Any]] = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = _Switch()
        fully_shard(model)
        zpp = zeropp.apply(model, exact) if ours else None
        x = torch.full((2, 6), dist.get_rank() + 1.0)
        for micro_batch, which in enumerate((0, 1)):
            if zpp:
                zpp.set_requires_cross_node_sync(micro_batch == 1)
            model(x, which).sum().backward()
        gradients.append([local(p.grad).clone() for p in model.parameters()])
    return gradients[0], gradients[1]


def test_micro_batches_that_use_different_parameters(ranks: Ranks) -> None:
    """FSDP2 reduces only parameters with a gradient: same sizes, other meaning. Sums must not mix them."""
    for ours, plain in ranks.run(_switching):
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
