"""Units of several groups of weights, on real gloo ranks: each is gathered as if it were alone."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zeropp
from tests.comm.test_all_gather import gather, make_all_gather
from tests.comm.test_column_groups import as_fsdp2_packs
from tests.examples import examples
from tests.ranks import Ranks
from zeropp.comm import StaleWeightsError, Weight

BF16, FP32 = torch.bfloat16, torch.float32
WEIGHTS = st.lists(
    st.builds(
        Weight,
        st.sampled_from([1, 3, 31, 128, 129, 1009]) | st.integers(1, 600),
        st.sampled_from([FP32, BF16, torch.float16, torch.uint8]),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
).map(tuple)


def parameters_of(weights: tuple[Weight, ...], step: int, seed: int) -> list[Tensor]:
    """A rank's parameters; trained ones are others in every step."""
    made = []
    for number, weight in enumerate(weights):
        generator = torch.Generator().manual_seed(
            1000 * seed + 10 * number + (step if weight.is_trained else 0)
        )
        values = torch.randn(weight.numel, generator=generator)
        made.append(
            (100 * values).to(torch.uint8) if weight.dtype == torch.uint8 else values.to(weight.dtype)
        )
    return made


def kind(weight: Weight) -> tuple[torch.dtype, bool]:
    return weight.dtype, weight.is_trained


def _three_steps(
    config: zeropp.Config, weights: tuple[Weight, ...]
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Gathers of the whole; the same, put together from gathers of neighbours of one kind, each by itself;
    and bytes across nodes in each gather."""
    comm, rank, world = make_all_gather(config, weights), dist.get_rank(), dist.get_world_size()
    trained = {number for number, weight in enumerate(weights) if weight.is_trained}
    stretches = [list(together) for _, together in groupby(weights, kind)]
    alone = [make_all_gather(config, stretch) for stretch in stretches]
    wholes, expected, sent = [], [], []
    for step in range(3):
        parameters = parameters_of(weights, step, rank)
        for _ in range(2):
            comm.wire.ledger.reset()
            wholes.append(gather(comm, as_fsdp2_packs(parameters)))
            sent.append(comm.wire.ledger.total(hop="across").wire_bytes)
        rows: list[list[Tensor]] = [[] for _ in range(world)]
        for stretch, own in zip(stretches, alone, strict=True):
            mine, parameters = parameters[: len(stretch)], parameters[len(stretch) :]
            for row, full in zip(rows, gather(own, torch.cat(mine)).chunk(world), strict=True):
                row.append(full)
            if stretch[0].is_trained:
                own.after_step()
        expected += 2 * [torch.cat([as_fsdp2_packs(row) for row in rows])]
        comm.after_step(trained)
    return wholes, expected, sent


@examples(25)
@given(
    weights=WEIGHTS,
    layout=st.sampled_from([(2, 2), (3, 2), (2, 1), (1, 2)]),
    codec=st.sampled_from(["none", "bf16", "int8", "delta-int4"]),
    keeps=st.sampled_from(["two-hop", "two-hop, nothing kept", "flat"]),
)
def test_groups_are_gathered_as_if_each_stretch_were_alone(
    ranks: Ranks, weights: tuple[Weight, ...], layout: tuple[int, int], codec: Any, keeps: str
) -> None:
    """To the last bit; and what is not trained crosses nodes once."""
    nodes, per_node = layout
    secondary = codec == "delta-int4" or keeps == "two-hop"
    config = zeropp.Config(
        weights=codec, secondary=secondary, node_size=per_node,
        route="flat" if keeps == "flat" and not secondary else "two-hop",
        gradients_in_node="none", gradients_across="none",
    )  # fmt: skip
    results = ranks.run(_three_steps, config, weights, world=nodes * per_node)
    trained = [weight.is_trained for weight in weights]
    for wholes, expected, sent in results:
        assert all(torch.equal(whole, parts) for whole, parts in zip(wholes, expected, strict=True))
        assert all(torch.equal(mine, first) for mine, first in zip(wholes, results[0][0], strict=True))
        if not secondary or nodes == 1:
            continue
        first, later = sent[0], {sent[2], sent[4]}
        assert sent[1::2] == [0, 0, 0]
        if not any(trained):
            assert later == {0}
        elif codec == "delta-int4":  # a block of differences may be longer than a few elements in 16 bits
            assert 0 not in later
        else:
            assert later == {first} if all(trained) else 0 < max(later) < first


BASE, ADAPTER = Weight(70_000, BF16, False), Weight(500, FP32)
LORA = (BASE, ADAPTER, ADAPTER, BASE, ADAPTER)


def _edit_what_is_not_sent(tell: bool) -> str:
    comm = make_all_gather(zeropp.Config(node_size=2), LORA)
    parameters = parameters_of(LORA, 0, dist.get_rank())
    gather(comm, as_fsdp2_packs(parameters))
    parameters[3][69_000] += 1
    comm.after_step({1, 2, 4})
    if tell:
        comm.after_step({3})
    try:
        gather(comm, as_fsdp2_packs(parameters))
    except StaleWeightsError as error:
        return str(error)
    return ""


def test_an_edit_of_frozen_weights_is_an_error_also_after_a_step_of_the_others(ranks: Ranks) -> None:
    assert all("call invalidate()" in message for message in ranks.run(_edit_what_is_not_sent, False))
    assert ranks.run(_edit_what_is_not_sent, True) == [""] * 4


def _freeze_and_unfreeze() -> list[int]:
    """Bytes across nodes of each step: all trained, then only adapters, a forward with all of it frozen,
    and all trained again."""
    lora = tuple(weight._replace(dtype=FP32) for weight in LORA)
    everything = [weight._replace(is_trained=True) for weight in lora]
    weights = list(everything)
    comm = make_all_gather(zeropp.Config(node_size=2), weights)
    sent = []

    def step(changed: set[int] | None) -> None:
        if changed is not None:
            comm.after_step(changed)
        comm.wire.ledger.reset()
        gather(comm, as_fsdp2_packs(parameters_of(lora, 0, dist.get_rank())))
        sent.append(comm.wire.ledger.total(hop="across").wire_bytes)

    step({0, 1, 2, 3, 4})
    step({0, 1, 2, 3, 4})
    weights[:] = lora
    step({1, 2, 4})
    step({1, 2, 4})
    weights[:] = [weight._replace(is_trained=False) for weight in lora]
    step(None)
    weights[:] = lora
    step({1, 2, 4})
    weights[:] = everything
    step({0, 1, 2, 3, 4})
    return sent


def test_groups_follow_what_is_trained_at_a_step(ranks: Ranks) -> None:
    for all_of_it, again, regrouped, adapters, reference, adapters_again, back in ranks.run(
        _freeze_and_unfreeze
    ):
        assert all_of_it == again == pytest.approx(regrouped, rel=0.005)
        assert back == regrouped
        assert adapters == adapters_again == pytest.approx(3 * 500 * 1.02, rel=0.05)
        assert reference == 0
