"""A Config that chooses itself, on real ranks: what it may choose, that all ranks choose the same, and that
training is right all the while.

To know what must be chosen, certain messages take long, by the clock that the search reads on one rank.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.ranks import Ranks
from tests.searches import (
    NODES,
    OVERLAPPED,
    STARTS,
    TO_THE_LAST,
    VISIT,
    Slow,
    logged,
    short_visits,
    slow,
    start,
    until_chosen,
)
from tests.training import Trainer, batches, loss_of
from zeropp._auto import DEFAULT, NODE_SHARD, PLAIN, Search


def _choose(what: Slow) -> dict[str, Any]:
    with logged() as text:
        trainer, zpp, search = start()
        begin = search.describe()
        with slow(what):
            losses = until_chosen(trainer, search)
        return {
            "begin": begin,
            "chosen": search.chosen,
            "seconds": search.seconds,
            "config": zpp.config,
            "losses": losses,
            "log": text(),
            "summary": zpp.summary(),
            "again": zeropp.apply(trainer.net, "auto") is zpp,
        }


def _plain(steps: int, micro_batches: int = 1) -> list[float]:
    trainer = Trainer(None, micro_batches=micro_batches)
    return [trainer.step() for _ in range(steps)]


def test_all_ranks_choose_what_is_fastest_on_the_slowest(ranks: Ranks) -> None:
    results = ranks.run(_choose, "large messages", env=NODES)
    plain, *_ = ranks.run(_plain, len(results[0]["losses"]))
    for result in results:
        assert result["begin"] == (
            f"auto tries {PLAIN}, {OVERLAPPED}, {NODE_SHARD}, {DEFAULT}: now {PLAIN}, visit 1 of 4"
        )
        assert (result["chosen"], result["config"]) == (DEFAULT, zeropp.Config())
        assert result["seconds"] == results[0]["seconds"]
        assert min(map(min, result["seconds"].values())) > 0
        assert result["losses"] == pytest.approx(plain, rel=0.01)
        assert f"auto has chosen {DEFAULT}: " in result["summary"]
        assert result["again"]
    first, *others = (result["log"] for result in results)
    for name in (PLAIN, OVERLAPPED, NODE_SHARD, DEFAULT):
        assert f"│ {name} " in first
    assert f"auto has chosen {DEFAULT}: " in first
    assert all("auto" not in other for other in others)


def test_where_plain_fsdp2_is_fastest_it_stays(ranks: Ranks) -> None:
    for result in ranks.run(_choose, "messages", env=NODES):
        assert result["chosen"] in (PLAIN, OVERLAPPED)
        assert result["config"] == zeropp.Config.off(overlap=result["chosen"] == OVERLAPPED)


@short_visits
def _left_out(hosts: str) -> tuple[list[str], str, list[float], list[float]]:
    """A search on ranks of these hosts, one letter each; and what plain FSDP2 does."""
    with logged() as text, patch.object(socket, "gethostname", lambda: hosts[dist.get_rank()]):
        trainer, _, search = start()
        losses = until_chosen(trainer, search)
        return list(search.candidates), text(), losses, _plain(len(losses))


def test_what_cannot_work_is_left_out_and_plain_fsdp2_is_plain_bit_for_bit(ranks: Ranks) -> None:
    results = ranks.run(_left_out, "aab", world=3)
    for candidates, _, losses, plain in results:
        assert candidates == [PLAIN, OVERLAPPED]
        assert losses == plain
        assert len(losses) > VISIT
    for name in (NODE_SHARD, DEFAULT):
        assert f"auto does not try {name}: the ranks of this shard group are spread unevenly" in results[0][1]
    (candidates, text, _, _), *_ = ranks.run(_left_out, "aa", world=2)
    assert candidates == [PLAIN, OVERLAPPED, DEFAULT]
    assert f"auto does not try {NODE_SHARD}: on one node there is none to keep" in text


def test_where_nothing_is_sent_there_is_nothing_to_search(ranks: Ranks) -> None:
    ((candidates, text, losses, plain),) = ranks.run(_left_out, "a", world=1)
    assert candidates == [PLAIN]
    assert len(losses) == 1
    assert losses == plain
    assert f"auto does not try {DEFAULT}: zeropp leaves every unit alone" in text
    assert f"auto has chosen {PLAIN}: nothing else can be tried here" in text


@short_visits
def _accumulate(flushes: bool) -> dict[str, Any]:
    """Two micro-batches a step: what waits after the first one, by candidate."""
    trainer, zpp, search = start()
    if flushes:
        zpp.set_requires_cross_node_sync(False)  # once and for all
    losses, waiting = [], {}
    for _ in range(TO_THE_LAST):
        trainer.optimizer.zero_grad()
        config = zpp.config
        loss = 0.0
        for is_last in (False, True):
            if not flushes:
                zpp.set_requires_cross_node_sync(is_last)
            loss += trainer.backward() / 2
            if not is_last:
                held = any(comms.unit.holds_gradients for comms in zpp.unit_comms)
                waiting[config] = (held, all(comms.has_pending for comms in zpp.unit_comms))
        zpp.flush()
        for p in trainer.net.parameters():
            assert p.grad is not None
            p.grad.div_(2)
        trainer.optimizer.step()
        losses.append(loss)
    return {
        "losses": losses,
        "waiting": {search_name(search, config): found for config, found in waiting.items()},
    }


def search_name(search: Search, config: zeropp.Config) -> str:
    return next(name for name, candidate in search.candidates.items() if candidate.config == config)


@pytest.fixture(scope="module")
def plain_of_two_micro_batches(ranks: Ranks) -> list[float]:
    losses: list[float] = ranks.run(_plain, TO_THE_LAST, 2)[0]
    return losses


@pytest.mark.parametrize("flushes", [False, True])
def test_gradients_accumulate_as_each_candidate_can(
    ranks: Ranks, flushes: bool, plain_of_two_micro_batches: list[float]
) -> None:
    """On two hops they wait inside the node. Plain FSDP2 reduces each micro-batch: never are the gradients of
    the whole model held, which may not fit."""
    for result in ranks.run(_accumulate, flushes, env=NODES):
        assert result["losses"] == pytest.approx(plain_of_two_micro_batches, rel=0.01)
        assert result["waiting"] == {
            PLAIN: (False, False),
            OVERLAPPED: (False, False),
            NODE_SHARD: (False, True),
            DEFAULT: (False, True),
        }


@short_visits
def _no_sync() -> dict[str, Any]:
    """A loop that has `no_sync`: where FSDP2 would hold gradients, plain FSDP2 does."""
    trainer, zpp, search = start()
    net: Any = trainer.net
    zpp.follow_no_sync()
    held = {}
    for _ in range(TO_THE_LAST):
        trainer.optimizer.zero_grad()
        for is_last in (False, True):
            net.set_requires_gradient_sync(is_last)
            loss_of(net, next(trainer.data)).backward()  # type: ignore[no-untyped-call]
            if not is_last:
                name = search_name(search, zpp.config)
                held[name] = all(comms.unit.holds_gradients for comms in zpp.unit_comms)
        trainer.optimizer.step()
    return held


def test_a_loop_with_no_sync_holds_what_it_held(ranks: Ranks) -> None:
    expected = {PLAIN: True, OVERLAPPED: True, NODE_SHARD: False, DEFAULT: False}
    assert ranks.run(_no_sync, env=NODES) == [expected] * 4


@short_visits
def _resume(folder: str) -> dict[str, Any]:
    path = Path(folder, f"{dist.get_rank()}.pt")
    trainer, zpp, search = start()
    for _ in range(VISIT + 2):  # in the middle of the second visit
        trainer.step()
    unfinished = zpp.state_dict()
    until_chosen(trainer, search)
    torch.save({"zeropp": zpp.state_dict(), "net": trainer.net.state_dict()}, path)
    state = torch.load(path, weights_only=False)  # DTensors; zeropp's own part needs no pickle:
    torch.save(state["zeropp"], path)
    saved = torch.load(path, weights_only=True)
    going_on = [trainer.evaluate(), trainer.evaluate()]

    again, other, found = start()
    again.step()
    again.net.load_state_dict(state["net"])
    outcome: dict[str, Any] = {"unfinished": other.load_state_dict(unfinished), "goes on": found.chosen}
    mixed = saved
    if dist.get_rank() == 2:  # as if files of two runs were mixed
        another = next(name for name in search.candidates if name != search.chosen)
        mixed = saved | {"auto": saved["auto"] | {"chosen": another}}
    other.load_state_dict(mixed)
    outcome["mixed"] = found.chosen
    outcome["used"] = other.load_state_dict(saved)
    outcome["same"] = (found.state_dict(), other.config) == (search.state_dict(), zpp.config)
    outcome["losses"] = ([again.evaluate(), again.evaluate()], going_on)
    again.step()
    outcome["stays"] = found.chosen == search.chosen
    plain = Trainer(zeropp.Config())
    assert plain.zpp is not None
    outcome["others"] = (plain.zpp.load_state_dict(saved), plain.zpp.search, "auto" in plain.zpp.state_dict())
    return outcome


def test_a_resumed_run_does_not_search_again(ranks: Ranks, tmp_path: Path) -> None:
    for outcome in ranks.run(_resume, str(tmp_path), env=NODES):
        assert (outcome["unfinished"], outcome["goes on"]) == (True, None)
        assert outcome["mixed"] is None
        assert outcome["used"]
        assert outcome["same"]
        assert outcome["losses"][0] == outcome["losses"][1]
        assert outcome["stays"]
        assert outcome["others"] == (True, None, False)


@short_visits
def _ended() -> dict[str, Any]:
    """A search that is ended in the middle: by set_config, by another apply, by remove; and one that goes on
    after an error of the loop."""
    outcome: dict[str, Any] = {}
    trainer, zpp, search = start()
    for _ in range(STARTS[NODE_SHARD] + 1):  # on two hops
        trainer.step()
    assert zpp.config.route == "two-hop"
    zpp.set_config(zeropp.Config.paper())
    for _ in range(VISIT):  # the search would have gone on to another one
        trainer.step()
    outcome["set_config"] = (zpp.search, zpp.config, "auto" in zpp.summary(), search.chosen, zpp.has_history)

    anew = zeropp.apply(trainer.net, "auto")
    trainer.step()
    given = zeropp.apply(trainer.net, zeropp.Config.off(overlap=False))  # what the search is trying
    outcome["apply"] = (anew is zpp, given is anew, given.search)

    removed = zeropp.apply(trainer.net, "auto")
    for _ in range(STARTS[NODE_SHARD] + 1):
        trainer.step()
    before = removed.communication_bytes
    removed.remove()
    plain = [trainer.step() for _ in range(VISIT)]
    assert removed.search is not None
    outcome["remove"] = (
        [comms.unit.installed() for comms in removed.unit_comms],
        removed.search.chosen,
        len(plain),
        before > 0 == removed.node_shard_bytes,
    )
    again = zeropp.apply(trainer.net, "auto")
    assert again.search is not None
    for step in range(VISIT + 2):
        if step == VISIT:
            with pytest.raises(RuntimeError, match="a bad batch"):
                _fail(trainer)
        trainer.step()
    until_chosen(trainer, again.search)
    outcome["error"] = again.search.chosen in again.search.candidates
    return outcome


def _fail(trainer: Trainer) -> None:
    loss_of(trainer.net, next(batches(3)))
    raise RuntimeError("a bad batch")


def test_what_ends_a_search_and_what_does_not(ranks: Ranks) -> None:
    for outcome in ranks.run(_ended, env=NODES):
        assert outcome["set_config"] == (None, zeropp.Config.paper(), False, None, False)
        assert outcome["apply"] == (False, False, None)
        assert outcome["remove"] == ([None] * 3, None, VISIT, True)
        assert outcome["error"]


@short_visits
def _several_optimizers(in_backward: bool) -> dict[str, int]:
    """An optimizer for each parameter: after how many steps each candidate is tried first."""
    trainer, zpp, search = start()
    optimizers = {p: torch.optim.SGD([p], lr=1e-3) for p in trainer.net.parameters()}

    def step(p: torch.nn.Parameter) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    if in_backward:
        for p in optimizers:
            p.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    starts: dict[str, int] = {}
    for number in range(TO_THE_LAST):
        starts.setdefault(search_name(search, zpp.config), number)
        trainer.backward()
        if not in_backward:
            for p in optimizers:
                step(p)
    return starts


@pytest.mark.parametrize("in_backward", [False, True])
def test_several_optimizers_make_one_step(ranks: Ranks, in_backward: bool) -> None:
    assert ranks.run(_several_optimizers, in_backward, env=NODES) == [STARTS] * 4


@short_visits
def _waiting_gradients() -> dict[str, int]:
    """One block accumulates over two steps of the others: after how many of these each candidate is tried."""
    trainer, zpp, search = start()
    zpp.follow_no_sync()
    net, block = trainer.net, trainer.net.blocks[1]
    slow_ones = {id(p) for p in block.parameters()}
    every_step = torch.optim.SGD([p for p in net.parameters() if id(p) not in slow_ones], lr=1e-3)
    every_other = torch.optim.SGD(block.parameters(), lr=1e-3)
    starts: dict[str, int] = {}
    for number in range(TO_THE_LAST + 1):
        starts.setdefault(search_name(search, zpp.config), number)
        is_last = number % 2 == 1
        block.set_requires_gradient_sync(is_last, recurse=False)  # type: ignore[operator]
        trainer.backward()
        for optimizer in (every_step, every_other) if is_last else (every_step,):
            optimizer.step()
            optimizer.zero_grad()
    return starts


def test_gradients_that_wait_for_another_optimizer_hold_a_change_up(ranks: Ranks) -> None:
    """They are lost in none: each change comes a step later, when they have gone across."""
    assert VISIT % 2 == 0  # so that all changes but the first would come when nothing waits
    expected = {name: start + (name != PLAIN) for name, start in STARTS.items()}
    assert ranks.run(_waiting_gradients, env=NODES) == [expected] * 4


def _refused() -> list[str]:
    trainer = Trainer(None)
    with pytest.raises(TypeError) as nonsense:
        zeropp.apply(trainer.net, "nonsense")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="overrides") as overrides:
        zeropp.apply(trainer.net, "auto", overrides={"blocks.*": zeropp.Config()})
    zpp = zeropp.apply(trainer.net, "auto")
    with pytest.raises(TypeError) as wrong_type:
        zpp.set_config("auto")  # type: ignore[arg-type]
    return [str(error.value) for error in (nonsense, overrides, wrong_type)]


def test_what_is_not_known_is_refused(ranks: Ranks) -> None:
    for nonsense, overrides, again in ranks.run(_refused, world=2):
        assert nonsense == "config is 'nonsense'; expected a zeropp.Config or 'auto'"
        assert overrides.startswith("overrides has ['blocks.*'] with config='auto'")
        assert again == "config is 'auto'; expected a zeropp.Config"
