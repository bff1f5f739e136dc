"""Gradients that wait inside the node: who may take, drop or flush them, and what must not go unseen."""

from __future__ import annotations

import logging
import logging.handlers
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import zeropp
from tests.configs import CONFIGS
from tests.ranks import Ranks
from tests.training import Net, Trainer, batches, local, loss_of, make_net
from zeropp._describe import UNUSUAL_FOOTPRINT
from zeropp._footprint import Footprint
from zeropp.tools.peak_memory import PeakMemory

EXACT = zeropp.Config(weights="none", gradients_in_node="none", gradients_across="none", node_size=2)
ON_2X2 = zeropp.Config(node_size=2)
MICRO_BATCHES = 3


def error_of(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def accumulating(config: zeropp.Config | None, **options: Any) -> Trainer:
    return Trainer(config, micro_batches=MICRO_BATCHES, accumulate_in_node=True, **options)


def one_pending(config: zeropp.Config) -> tuple[Trainer, zeropp.ZeroPP]:
    """A trainer with one micro-batch pending."""
    trainer = Trainer(config)
    assert trainer.zpp is not None
    trainer.zpp.set_requires_cross_node_sync(False)
    trainer.backward()
    return trainer, trainer.zpp


def _taken_in_backward() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A hook adds each gradient to a store of its own and frees it, as gradient offload does."""
    stores: list[dict[str, Tensor]] = []
    for config in (None, EXACT):
        trainer, store = accumulating(config), dict[str, Tensor]()
        for name, p in trainer.net.named_parameters():

            def take(p: Tensor, name: str = name, store: dict[str, Tensor] = store) -> None:
                store[name] = store.get(name, 0) + local(p.grad)
                p.grad = None

            p.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
        trainer.backward()
        stores.append(store)
    return stores[0], stores[1]


def test_a_hook_that_takes_gradients_gets_all_of_them(ranks: Ranks) -> None:
    for plain, ours in ranks.run(_taken_in_backward):
        assert plain.keys() == ours.keys()
        for name, gradient in plain.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6)


def _taken_between() -> list[str]:
    errors = []
    for told in (False, True):
        trainer, zpp = one_pending(EXACT)
        for p in trainer.net.blocks[0].parameters():
            p.grad = None
        if told:
            zpp.drop_pending_gradients()
        errors.append(error_of(trainer.backward))
    return errors


def test_gradients_taken_between_micro_batches_are_an_error(ranks: Ranks) -> None:
    """Dropped or taken? Nobody said so."""
    for untold, told in ranks.run(_taken_between):
        assert "RuntimeError: .grad of unit 'blocks.0' is gone" in untold
        assert told == "no error"


def _zero(trainer: Trainer, how: str) -> None:
    parameters = list(trainer.net.parameters())
    if how == "optimizer":
        trainer.optimizer.zero_grad()
    elif how == "to zeros":
        trainer.optimizer.zero_grad(set_to_none=False)
    elif how == "module":
        trainer.net.zero_grad()
    elif how == "two optimizers":
        for some in (parameters[::2], parameters[1::2]):
            torch.optim.SGD(some, lr=0.1).zero_grad()
    else:
        torch.optim.SGD(parameters[::2], lr=0.1).zero_grad(set_to_none=how == "half")


def _zeroed(how: str) -> tuple[dict[str, Tensor], dict[str, Tensor], int, list[str]]:
    disturbed, plain = one_pending(EXACT)[0], Trainer(EXACT)
    _zero(disturbed, how)  # a bad batch: start over
    assert disturbed.zpp is not None
    kept = disturbed.zpp.communication_bytes
    disturbed.zpp.drop_pending_gradients()
    freed = kept - disturbed.zpp.communication_bytes
    disturbed.zpp.set_requires_cross_node_sync(True)
    disturbed.data, plain.data = batches(7), batches(7)
    disturbed.backward()
    plain.backward()
    paper, reached = zeropp.Config.paper(node_size=2), []
    trainer, zpp = one_pending(EXACT)
    _zero(trainer, how)
    reached.append(error_of(zpp.set_config, paper))
    trainer.backward()
    _zero(trainer, how)
    reached.append(error_of(zeropp.apply, trainer.net, EXACT))
    trainer, zpp = one_pending(EXACT)
    _zero(trainer, how)
    reached.append(error_of(zpp.remove))
    return disturbed.local_gradients(), plain.local_gradients(), freed, reached


@pytest.mark.parametrize("how", ["optimizer", "to zeros", "module", "two optimizers"])
def test_zero_grad_drops_what_is_pending_at_once(ranks: Ranks, how: str) -> None:
    for disturbed, plain, freed, reached in ranks.run(_zeroed, how):
        assert freed == 0  # there was nothing left to drop
        assert all(torch.equal(disturbed[name], plain[name]) for name in plain)
        assert reached == ["no error"] * 3


def _half_zeroed(how: str) -> tuple[str, str]:
    trainer, zpp = one_pending(EXACT)
    _zero(trainer, how)
    return error_of(trainer.backward), error_of(zpp.remove)


@pytest.mark.parametrize("how", ["half", "half to zeros"])
def test_zero_grad_of_a_part_of_a_unit_is_an_error(ranks: Ranks, how: str) -> None:
    for backward, remove in ranks.run(_half_zeroed, how):
        assert "drop_pending_gradients()" in backward
        assert "still pending" in remove


def _of_another_model() -> str:
    zpp, second = one_pending(EXACT)[1], one_pending(EXACT)[0]
    second.optimizer.zero_grad()
    return error_of(zpp.remove)


def test_zero_grad_of_another_model_drops_nothing(ranks: Ranks) -> None:
    assert all("still pending" in error for error in ranks.run(_of_another_model))


def _flushed(config: zeropp.Config, options: dict[str, Any]) -> tuple[list[list[Tensor]], list[str]]:
    """Two steps of two micro-batches, ended by flush(), and by a third whose gradients are zero."""
    gradients, errors, calls = [], [], []
    for flush in (True, False):
        trainer = Trainer(config, net=make_net(**options))
        assert trainer.zpp is not None
        for _ in range(2):
            trainer.zpp.set_requires_cross_node_sync(False)
            for _ in range(2):
                trainer.backward()
            if flush:
                errors.append(error_of(trainer.optimizer.step))
                trainer.zpp.flush()
            else:
                trainer.zpp.set_requires_cross_node_sync(True)
                (0.0 * loss_of(trainer.net, next(batches(3)))).backward()  # type: ignore[no-untyped-call]
            seen = trainer.local_gradients()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
        gradients.append(list(seen.values()))
        calls.append(trainer.zpp.ledger.total(collective="reduce_scatter", hop="across").calls)
    assert calls[0] == calls[1] == 6  # three units, twice
    return gradients, errors


HALF = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


@pytest.mark.parametrize("name", ["default", "four_bit", "feedback", "half rotated"])
@pytest.mark.parametrize("options", [{}, HALF], ids=["fp32", "bf16"])
def test_flush_is_a_last_micro_batch_of_zeros(ranks: Ranks, name: str, options: dict[str, Any]) -> None:
    for (flushed, synced), errors in ranks.run(_flushed, CONFIGS[name], options):
        assert any(gradient.any() for gradient in flushed)
        assert [gradient.dtype for gradient in flushed] == [gradient.dtype for gradient in synced]
        assert all(torch.equal(a, b) for a, b in zip(flushed, synced, strict=True))
        assert all("or flush() after it" in error for error in errors)


def _flushed_to_hooks() -> tuple[float, float, list[str]]:
    """Hooks see what flush() brings; with FSDP2's own sync off nothing would be sent."""
    trainer, zpp = one_pending(EXACT)
    expected = Trainer(EXACT)
    expected.backward()
    seen: dict[int, Tensor] = {}
    for p in trainer.net.parameters():
        p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda p: seen.update({id(p): local(p.grad).clone()})
        )
    root = cast(FSDPModule, trainer.net)
    root.set_requires_gradient_sync(False)
    errors = [error_of(zpp.flush)]
    root.set_requires_gradient_sync(True)
    errors += [error_of(zpp.flush), error_of(zpp.flush)]  # the second has nothing to do
    norms = [
        sum(g.norm().item() for g in some) for some in (seen.values(), expected.local_gradients().values())
    ]
    return norms[0], norms[1], errors


def test_hooks_see_what_flush_brings(ranks: Ranks) -> None:
    for ours, expected, errors in ranks.run(_flushed_to_hooks):
        assert ours == pytest.approx(expected, rel=1e-5) != 0
        assert "set_requires_gradient_sync(True)" in errors[0]
        assert errors[1:] == ["no error"] * 2


def _released(config: zeropp.Config) -> dict[str, Any]:
    kept, sent, losses = [], [], []
    for release in (True, False):
        trainer = Trainer(config)
        zpp = trainer.zpp
        assert zpp is not None
        trainer.step()
        cast(FSDPModule, trainer.net).reshard()
        if release:
            kept.append(zpp.communication_bytes)
            zpp.release()
            kept.append(zpp.communication_bytes)
        else:
            zpp.invalidate()
        before = zpp.ledger.total(collective="all_gather", hop="across").wire_bytes
        losses.append([trainer.evaluate(), trainer.step()])
        sent.append(zpp.ledger.total(collective="all_gather", hop="across").wire_bytes - before)
        kept.append(zpp.communication_bytes)
    assert zpp is not None
    errors = sum(comms.keeps().errors for comms in zpp.unit_comms)
    zpp.set_requires_cross_node_sync(False)
    trainer.backward()
    return {"kept": kept, "sent": sent, "losses": losses, "pending": error_of(zpp.release), "errors": errors}


@pytest.mark.parametrize("name", ["default", "four_bit"])
def test_release_gives_up_what_the_next_gather_can_fill(ranks: Ranks, name: str) -> None:
    for found in ranks.run(_released, CONFIGS[name]):
        before, asleep, awake, invalidated = found["kept"]
        assert asleep == found["errors"]  # all that is left: they could not be brought back
        assert awake == before == invalidated
        assert found["losses"][0] == found["losses"][1]
        assert found["sent"][0] == found["sent"][1]
        assert "still pending" in found["pending"]


def _resident() -> tuple[int, int, int]:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))
    fully_shard(model)
    zpp = zeropp.apply(model, zeropp.Config(node_size=1))
    with torch.no_grad():
        model(torch.ones(1, 2048))
    cast(FSDPModule, model).reshard()
    kept, before = zpp.communication_bytes, PeakMemory.resident_bytes()
    zpp.release()
    return kept, before - PeakMemory.resident_bytes(), zpp.communication_bytes


def test_released_memory_is_the_system_s_again(ranks: Ranks) -> None:
    for kept, returned, left in ranks.run(_resident, world=2):
        assert kept > 16 * 2**20  # one rank a node: all of the model, in bytes
        assert returned > 0.9 * kept
        assert left == 0


def _pending_in_bf16() -> tuple[float, list[list[Tensor]], list[list[Tensor]], list[int]]:
    """Relative error of a step of 16 micro-batches; a shorter one, and the same again; the next one, and the
    same after a resume; bytes that are pending."""
    config = replace(EXACT, gradients_pending="bf16", seed=3)
    flat, kept = [], []
    for each in (EXACT, config):
        trainer = Trainer(each, micro_batches=16, accumulate_in_node=True)
        trainer.backward()
        flat.append(torch.cat([g.flatten() for g in trainer.local_gradients().values()]).double())
        trainer, zpp = one_pending(each)
        before = zpp.communication_bytes
        zpp.drop_pending_gradients()
        kept.append(before - zpp.communication_bytes)
    first, again, resumed = (accumulating(config) for _ in range(3))
    repeated = []
    for trainer in (first, again):
        trainer.backward()
        repeated.append(list(trainer.local_gradients().values()))
    assert first.zpp is not None
    assert resumed.zpp is not None
    resumed.zpp.load_state_dict(first.zpp.state_dict())
    following = []
    for trainer in (first, resumed):
        trainer.optimizer.zero_grad()
        trainer.data = batches(9)
        trainer.backward()
        following.append(list(trainer.local_gradients().values()))
    return ((flat[1] - flat[0]).norm() / flat[0].norm()).item(), repeated, following, kept


def test_pending_sums_in_bf16(ranks: Ranks) -> None:
    for error, repeated, following, kept in ranks.run(_pending_in_bf16):
        assert 0 < error < 0.01
        for first, second in (repeated, following):
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert kept[1] * 2 == kept[0] > 0


def _announced(config: zeropp.Config, options: dict[str, Any]) -> dict[str, Any]:
    """What will be kept, as told before anything is; what is kept, in the middle of a step and after it."""
    net = make_net(**options)
    net.blocks[1].requires_grad_(False)
    net.head.bias.requires_grad_(False)
    handler = logging.handlers.BufferingHandler(capacity=1000)
    logging.getLogger("zeropp").addHandler(handler)
    trainer = Trainer(config, net=net)
    zpp = trainer.zpp
    assert zpp is not None
    told, summary = [comms.will_keep() for comms in zpp.unit_comms], zpp.summary()
    assert all(comms.keeps() == Footprint() for comms in zpp.unit_comms)
    warned = [record.getMessage() for record in handler.buffer]
    trainer.step()
    zpp.set_requires_cross_node_sync(False)
    logging.getLogger("zeropp").removeHandler(handler)
    trainer.optimizer.zero_grad()
    trainer.backward()
    during = [comms.keeps() for comms in zpp.unit_comms]
    shards = sum(comms.unit.shard_bytes for comms in zpp.unit_comms)
    accumulating = [record.getMessage() for record in handler.buffer][len(warned) :]
    found = {"told": told, "kept": during, "summary": summary, "shards": shards}
    return found | {"at apply": warned, "accumulating": accumulating}


@pytest.mark.parametrize("name", ["default", "four_bit", "delta", "feedback", "bf16 pending"])
@pytest.mark.parametrize("options", [{}, HALF], ids=["fp32", "bf16"])
def test_what_is_kept_is_told_before(ranks: Ranks, name: str, options: dict[str, Any]) -> None:
    configs = CONFIGS | {"bf16 pending": replace(ON_2X2, gradients_pending="bf16")}
    for found in ranks.run(_announced, configs[name], options):
        assert found["told"] == found["kept"]
        total = sum(found["told"], Footprint())
        assert total.node_shard
        assert total.pending
        for unit in found["told"]:
            assert f" {unit.node_shard + unit.errors:,} │ {unit.pending:>7,} │" in found["summary"]
        assert not [text for text in found["at apply"] if "will hold" in text]
        assert total.total < UNUSUAL_FOOTPRINT * found["shards"]  # usual on two nodes
        assert found["accumulating"] == []


def test_an_unusual_footprint_is_a_warning_on_one_rank(ranks: Ranks) -> None:
    """Four nodes of one rank: full gradients in fp32, and a whole reference in 16 bits, on every rank."""
    for rank, found in enumerate(ranks.run(_announced, replace(CONFIGS["four_bit"], node_size=1), {})):
        assert sum(found["told"], Footprint()).total > UNUSUAL_FOOTPRINT * found["shards"]
        assert len(found["accumulating"]) == (rank == 0)
        assert all("pending gradients" in text for text in found["accumulating"])


class _Repeated(Net):
    """Uses its first block several times, and can leave out the head of some forwards."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens.flatten())
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[0]):
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def _repeated(config: zeropp.Config, disturb: str) -> tuple[int, dict[str, int], list[Tensor], list[Tensor]]:
    """Hops across nodes by unit in a step of two micro-batches, and gradients: ours, and FSDP2's."""
    gradients = []
    for each in (config, None):
        torch.manual_seed(0)
        net = _Repeated()
        for block in net.blocks:
            fully_shard(block)
        trainer = Trainer(each, net=cast(Net, fully_shard(net)))
        if disturb == "backward prefetch":
            cast(FSDPModule, net.blocks[1]).set_modules_to_backward_prefetch(
                [cast(FSDPModule, net.blocks[0])]
            )
        for is_last in (False, True):
            if trainer.zpp is not None:
                trainer.zpp.set_requires_cross_node_sync(is_last)
            losses = [
                loss_of(trainer.net, next(trainer.data)) for _ in range(1 + (disturb == "two forwards"))
            ]
            if disturb == "evaluation":
                trainer.evaluate()
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        if trainer.zpp is not None:
            trainer.zpp.set_requires_cross_node_sync(True)
            ledger, units = trainer.zpp.ledger, [comms.unit.name for comms in trainer.zpp.unit_comms]
            pending = sum(comms.has_pending for comms in trainer.zpp.unit_comms)
            across = {
                unit: ledger.total(unit=unit, collective="reduce_scatter", hop="across").calls
                for unit in units
            }
        gradients.append(list(trainer.local_gradients().values()))
    return pending, across, gradients[0], gradients[1]


@pytest.mark.parametrize("disturb", ["nothing", "two forwards", "evaluation", "backward prefetch"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_unit_that_is_used_several_times_crosses_once(ranks: Ranks, disturb: str, overlap: bool) -> None:
    for pending, across, ours, plain in ranks.run(_repeated, replace(EXACT, overlap=overlap), disturb):
        assert pending == 0
        assert across == {"(root)": 1, "blocks.0": 1, "blocks.1": 1}
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
