"""Strategies in training, on local ranks that act as two nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.profiler import ProfilerActivity, profile

from tests.ranks import Ranks
from zeropp.tools.bench.training import BenchTraining, start_training
from zeropp.tools.bench.workload import Workload
from zeropp.tools.strategies import find_strategy

TINY = Workload(layers=1, width=64, context=16, batch=2)


def start(name: str) -> BenchTraining:
    strategy = find_strategy(name)
    if strategy.config is not None:  # all local ranks are on one host
        strategy = replace(strategy, config=replace(strategy.config, node_size=2))
    return start_training(strategy, TINY, ranks_per_node=2)


def losses(name: str, micro_batches: int) -> list[float]:
    training = start(name)
    return [training.step(micro_batches) for _ in range(3)]


def sent_in_second_step(name: str, micro_batches: int) -> int:
    training = start(name)
    sent = []
    for _ in range(2):
        training.step(micro_batches)
        sent.append(training.ledger_bytes() or 0)
    return sent[1] - sent[0]


def state_bytes(name: str) -> int:
    training = start(name)
    training.step(micro_batches=1)
    return training.model_state_bytes()


def collectives(name: str) -> set[str]:
    training = start(name)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        training.step(micro_batches=1)
    return {event.name for event in profiler.events() if event.name.startswith("gloo:")}


def test_strategies_start_with_the_same_model_and_data(ranks: Ranks) -> None:
    plain = ranks.run(losses, "fsdp2", 2)
    for name in ("hsdp", "wire16-two-hop", "default"):
        for ours, theirs in zip(ranks.run(losses, name, 2), plain, strict=True):
            assert ours == pytest.approx(theirs, rel=0.02)


def test_strategies_synchronize_per_step_or_per_micro_batch(ranks: Ranks) -> None:
    """The default sends across nodes once per step. wire16 sends in every micro-batch, and
    wire16-accumulate sends only its weights in every micro-batch."""
    once, several = (ranks.run(sent_in_second_step, "default", count)[0] for count in (1, 3))
    assert 0 < once == several
    once, several = (ranks.run(sent_in_second_step, "wire16", count)[0] for count in (1, 3))
    assert several == 3 * once
    (weights_only, *_) = ranks.run(sent_in_second_step, "wire16-accumulate", 3)
    assert once < weights_only < several


def test_hsdp_has_the_whole_state_on_every_node(ranks: Ranks) -> None:
    (plain, *_), (replicated, *_) = (ranks.run(state_bytes, name) for name in ("fsdp2", "hsdp"))
    assert replicated == pytest.approx(2 * plain, rel=0.02)


def test_compute_alone_sends_nothing(ranks: Ranks) -> None:
    (sent, *_) = ranks.run(collectives, "compute")
    assert sent == {"gloo:barrier"}
