"""Overlap on CPU: the same bits with and without, whatever the loop does meanwhile."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import zeropp
from tests.configs import CONFIGS
from tests.ranks import RankError, Ranks
from tests.training import Net, Trainer, local, make_net
from zeropp.comm.profiler_labels import Label, profile_all_threads

ALL = {
    **CONFIGS,
    "off": zeropp.Config.off(node_size=2),
    "wire16": zeropp.Config.wire16(node_size=2),
    "wire16 on two hops": zeropp.Config.wire16(node_size=2, route="two-hop"),
    "flat integers": zeropp.Config(
        route="flat", gradients_in_node="int8", gradients_across="int8", secondary=False, node_size=2
    ),
    "no node shard": zeropp.Config(secondary=False, node_size=2),
}


def _bits(trainer: Trainer) -> list[Tensor]:
    return [tensor.clone() for tensor in trainer.local_gradients().values()]


def _train(config: zeropp.Config, micro_batches: int) -> tuple[list[float], list[Tensor]]:
    """Steps with accumulation, clipping, and an evaluation after each; the second gathers early."""
    trainer = Trainer(config, micro_batches=micro_batches, accumulate_in_node=True)
    losses = []
    for _ in range(2):
        trainer.optimizer.zero_grad()
        losses.append(trainer.backward())
        losses.append(nn.utils.clip_grad_norm_(trainer.net.parameters(), 0.5).full_tensor().item())  # type: ignore[attr-defined]
        trainer.optimizer.step()
        losses.append(trainer.evaluate())
    return losses, _bits(trainer)


def _with_and_without(config: zeropp.Config, micro_batches: int) -> None:
    (with_it, gradients), (without, expected) = (
        _train(replace(config, overlap=overlap), micro_batches) for overlap in (True, False)
    )
    assert with_it == without
    assert len(gradients) == len(expected)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))  # signs of zeros, too


@pytest.mark.parametrize("name", ALL)
def test_it_changes_no_bit(ranks: Ranks, name: str) -> None:
    ranks.run(_with_and_without, ALL[name], 2)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("default", shape) for shape in [(3, 2), (2, 3), (1, 3), (3, 1), (6, 1)]),
        *(("four_bit", shape) for shape in [(3, 2), (1, 3)]),
        *(("wire16", shape) for shape in [(2, 3), (6, 1)]),
    ],
)
def test_it_changes_no_bit_on_any_layout(ranks: Ranks, name: str, shape: tuple[int, int]) -> None:
    nodes, per_node = shape
    ranks.run(_with_and_without, replace(ALL[name], node_size=per_node), 1, world=nodes * per_node)


def _threads_of_hops(overlap: bool) -> tuple[set[int], int, bool]:
    """Threads that hops ran in, the training thread, and whether FSDP2 was told to look ahead."""
    trainer = Trainer(zeropp.Config(node_size=2, overlap=overlap))
    trainer.step()
    with profile_all_threads() as prof:
        trainer.step()
    events = list(prof.events())
    labels = [(event.thread, label) for event in events if (label := Label.read(event.name))]
    hops = {thread for thread, label in labels if label.part != "wait"}
    (mine,) = {event.thread for event in events if event.name == "FSDP::root_pre_forward"} or {
        event.thread for event in events if event.name == "aten::linear"
    }
    assert trainer.zpp is not None
    units = [comms.unit for comms in trainer.zpp.unit_comms]
    looks_ahead = sum(unit.has_forward_prefetch for unit in units) == len(units) - 1
    trainer.zpp.remove()
    assert not any(unit.has_forward_prefetch for unit in units)
    return hops, mine, looks_ahead


def test_hops_run_in_threads_of_their_own_and_gathers_start_early(ranks: Ranks) -> None:
    for hops, mine, looks_ahead in ranks.run(_threads_of_hops, True):
        assert hops
        assert mine not in hops
        assert looks_ahead
    for hops, mine, looks_ahead in ranks.run(_threads_of_hops, False):
        assert hops == {mine}
        assert not looks_ahead


def _starts_in_training_thread() -> list[str]:
    """Gathers that a forward asks for, by their units, and when it first waits for one."""
    trainer = Trainer(zeropp.Config(node_size=2))
    trainer.step()
    with profile_all_threads() as prof:
        trainer.evaluate()
    named = {}
    for event in prof.events():
        what, _, unit = event.name.partition(" ")
        if what == "FSDP::all_gather":
            named[event.time_range.start] = unit
        elif (label := Label.read(event.name)) and label.part == "wait":
            named[event.time_range.start] = "wait"
    return [named[start] for start in sorted(named)]


def test_the_second_unit_is_gathered_with_the_first(ranks: Ranks) -> None:
    for starts in ranks.run(_starts_in_training_thread):
        assert starts[:4] == ["", "(blocks.0)", "wait", "(blocks.1)"]  # FSDP2 has no name for the root


class _EarlyExit(Net):
    """May leave out the last block, after FSDP2 has been told to gather it early."""

    is_early = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens.flatten())
        for block in self.blocks[: -1 if self.is_early else None]:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def in_place(trainer: Trainer) -> None:
    with torch.no_grad():
        for p in trainer.net.parameters():
            p.mul_(0.5)


def by_a_load(trainer: Trainer) -> None:
    trainer.net.load_state_dict({name: p * 0.5 for name, p in trainer.net.state_dict().items()})


def by_a_step_without_a_forward(trainer: Trainer) -> None:
    for p in trainer.net.parameters():
        p.grad = torch.ones_like(p)
    trainer.optimizer.step()


def by_invalidate(trainer: Trainer) -> None:
    with torch.no_grad():
        for p in trainer.net.parameters():
            local(p).mul_(0.5)
    assert trainer.zpp is not None
    trainer.zpp.invalidate()


def _left_out(overlap: bool) -> list[float]:
    """Losses after changes, when a unit had been gathered and not used."""
    losses = []
    for change in (in_place, by_a_load, by_a_step_without_a_forward, by_invalidate):
        torch.manual_seed(0)
        net = _EarlyExit()
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
        trainer = Trainer(zeropp.Config(node_size=2, overlap=overlap), net=net)
        trainer.step()
        net.is_early = True
        trainer.evaluate()
        net.is_early = False
        net.reshard()  # type: ignore[operator]  # the root is still gathered
        assert trainer.zpp is not None
        assert trainer.zpp.unit_comms[-1].unit.has_early_gather == overlap
        change(trainer)
        losses.append(trainer.evaluate())
    return losses


def test_what_was_gathered_and_left_out_is_not_used_after_a_change(ranks: Ranks) -> None:
    assert ranks.run(_left_out, True) == ranks.run(_left_out, False)


def _skipping(name: str, overlap: bool, disturb: str) -> list[float]:
    """Losses of steps of which the second leaves a unit out, which has then been gathered for nothing."""
    torch.manual_seed(0)
    net = _EarlyExit()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    config = replace(CONFIGS[name], overlap=overlap)
    trainer = Trainer(config, net=net)
    losses = [trainer.step()]
    for is_early in (True, False, True, True, False):
        net.is_early = is_early
        losses.append(trainer.evaluate() if disturb == "evaluation" else trainer.backward())
        zpp = cast(zeropp.ZeroPP, trainer.zpp)
        if disturb == "resume":
            state = zpp.state_dict()
            zpp.remove()
            trainer.zpp = zeropp.apply(net, config)
            trainer.zpp.load_state_dict(state)
        elif disturb == "set_config":
            zpp.set_config(
                replace(config, rounding="stochastic" if config.rounding == "nearest" else "nearest")
            )
        cast(FSDPModule, net).reshard()
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    net.is_early = False
    return [*losses, trainer.evaluate()]


@pytest.mark.parametrize("disturb", ["nothing", "evaluation", "resume", "set_config"])
@pytest.mark.parametrize("name", ["four_bit", "delta"])
def test_what_was_gathered_and_left_out_has_no_effect(ranks: Ranks, name: str, disturb: str) -> None:
    expected = ranks.run(_skipping, name, False, "nothing" if disturb == "resume" else disturb)
    assert ranks.run(_skipping, name, True, disturb) == expected


def _with_own_prefetch() -> bool:
    net = make_net()
    first, second = (cast(FSDPModule, block) for block in net.blocks)
    first.set_modules_to_forward_prefetch([second])
    trainer = Trainer(zeropp.Config(node_size=2), net=net)
    trainer.step()
    assert trainer.zpp is not None
    units = {comms.unit.name: comms.unit for comms in trainer.zpp.unit_comms}
    return [name for name, unit in units.items() if unit.has_forward_prefetch] == ["blocks.0"]


def test_what_the_user_told_fsdp2_to_gather_early_stays(ranks: Ranks) -> None:
    assert all(ranks.run(_with_own_prefetch))


def _mixed(overlap: bool) -> tuple[list[float], list[Tensor]]:
    """bf16 parameters whose gradients FSDP2 converts after the reduction, added up over two backwards."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    trainer = Trainer(zeropp.Config(node_size=2, overlap=overlap), net=make_net(mp_policy=policy))
    losses = [trainer.backward() for _ in range(3)]
    return losses, _bits(trainer)


def _hooked(overlap: bool) -> tuple[list[float], list[Tensor]]:
    """The optimizer in backward: hooks look at `.grad` and take it."""
    net = make_net()
    seen: list[Tensor] = []

    def take(p: Any) -> None:
        seen.append(p.grad.to_local().clone())
        p.grad = None

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    trainer = Trainer(zeropp.Config(node_size=2, overlap=overlap), net=net)
    return [trainer.backward() for _ in range(2)], seen


def _failing(trainer: Trainer) -> None:
    """A backward that raises on every rank after the last block's gradients are on their way."""

    def fail(gradient: Tensor) -> Tensor:
        raise RuntimeError("in the middle")

    def forward_and_fail(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(fail)  # type: ignore[no-untyped-call]

    hook = trainer.net.blocks[0].register_forward_hook(forward_and_fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.backward()
    hook.remove()
    cast(FSDPModule, trainer.net).reset_iter_state()  # as FSDP2 asks for


def _failed_in_between(overlap: bool) -> tuple[list[float], list[Tensor]]:
    trainer = Trainer(zeropp.Config(node_size=2, overlap=overlap))
    losses = [trainer.step()]
    _failing(trainer)
    losses += [trainer.step(), trainer.step()]
    return losses, _bits(trainer)


def _failed_and_set_to_zero(overlap: bool) -> tuple[list[float], list[Tensor]]:
    """Whatever arrives late in gradients that were set to zero is not added to the next ones."""
    trainer = Trainer(zeropp.Config(node_size=2, overlap=overlap))
    losses = [trainer.step()]
    trainer.optimizer.zero_grad()
    _failing(trainer)
    trainer.optimizer.zero_grad(set_to_none=False)
    losses += [trainer.backward(), trainer.backward()]
    return losses, _bits(trainer)


@pytest.mark.parametrize("run", [_mixed, _hooked, _failed_in_between, _failed_and_set_to_zero])
def test_it_changes_no_bit_in(ranks: Ranks, run: Any) -> None:
    for (losses, gradients), (expected, theirs) in zip(
        ranks.run(run, True), ranks.run(run, False), strict=True
    ):
        assert losses == expected
        assert len(gradients) == len(theirs) > 0
        for ours, other in zip(gradients, theirs, strict=True):
            assert torch.equal(ours, other)


def _peer_dies() -> None:
    """Who talks to the dead one raises at once; the others, who wait for those, after the timeout."""
    trainer = Trainer(zeropp.Config(node_size=2))
    trainer.step()
    assert trainer.zpp is not None
    trainer.zpp.set_timeout(timedelta(seconds=10))
    if dist.get_rank() == 3:
        trainer.net.blocks[1].register_full_backward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    for _ in range(100):
        trainer.step()


def test_a_killed_peer_is_an_error_on_the_others_that_names_the_unit(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(_peer_dies)
    said = str(caught.value)
    assert "rank 3 was ended by SIGKILL" in said
    assert "no answer" not in said
    assert "of unit 'blocks." in said
    assert "in a comm thread" in said


def _where_gradients_are() -> tuple[bool, bool, bool, str]:
    """Whether FSDP2 would make `.grad` of a buffer, for the last block; and what is said if it did not."""
    trainer = Trainer(zeropp.Config(node_size=2))
    zpp = cast(zeropp.ZeroPP, trainer.zpp)
    unit = zpp.unit_comms[-1].unit
    fp32, bf16 = torch.empty(1), torch.empty(1, dtype=torch.bfloat16)
    before = unit.makes_gradients_of(fp32), unit.makes_gradients_of(bf16)
    trainer.backward()
    with pytest.raises(RuntimeError) as raised:
        unit.check_gradients_are_of(fp32)
    return *before, unit.makes_gradients_of(fp32), str(raised.value)


def test_gradients_are_made_of_the_buffer_that_they_are_reduced_to(ranks: Ranks) -> None:
    for fresh, other_dtype, to_add_to, said in ranks.run(_where_gradients_are):
        assert (fresh, other_dtype, to_add_to) == (True, False, False)
        assert "were read before they were reduced" in said
        assert "Config(overlap=False)" in said


def _held(overlap: bool) -> tuple[int, int]:
    """communication_bytes in the middle of a backward and after it, where gradients are added to others."""
    net = make_net()
    trainer = Trainer(zeropp.Config(node_size=2, overlap=overlap), net=net)
    zpp = cast(zeropp.ZeroPP, trainer.zpp)
    trainer.step()
    seen: list[int] = []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: seen.append(zpp.communication_bytes))  # type: ignore[no-untyped-call]

    net.blocks[0].register_forward_hook(look)
    trainer.backward()
    return seen[0], zpp.communication_bytes


def test_gradients_on_their_way_are_counted_as_memory(ranks: Ranks) -> None:
    block = sum(p.numel() for p in Net().blocks[0].parameters())
    for during, after in ranks.run(_held, True):
        assert during - after >= block  # a fourth of blocks.1, in fp32; all of it as well, until it is read
    for during, after in ranks.run(_held, False):
        assert during == after
