from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import HANG_SECONDS, Ranks
from tests.tools.doctor.check_job import run
from zeropp.comm import wire
from zeropp.tools.doctor import collectives
from zeropp.tools.doctor.check import Check, DoctorSettings
from zeropp.topology import Hop


def checks(settings: DoctorSettings) -> Iterator[Check]:
    return collectives.checks()


def test_two_nodes_of_two_ranks(ranks: Ranks) -> None:
    found, *_ = run(ranks, checks)
    assert {result.state for result in found.values()} == {"ok"}
    assert list(found) == ["hop in-node", "hop across", "hop flat", "both directions at once", "sums"]


def test_one_node_skips_the_hop_across(ranks: Ranks) -> None:
    found, *_ = run(ranks, checks, node_size=3, world=3)
    assert {name: result.state for name, result in found.items() if result.state != "ok"} == {
        "hop across": "not run"
    }
    assert "all ranks are on one node" in found["hop across"].saw


def forgets_to_wait() -> AbstractContextManager[object]:
    """Messages are sent, and no rank waits for them."""
    forgotten: list[dist.Work] = []
    return patch.object(Hop, "wait_for", lambda hop, message: forgotten.append(message))


@pytest.mark.parametrize("name", ["hop across", "both directions at once"])
def test_a_hop_that_drops_a_wait_is_named(ranks: Ranks, name: str) -> None:
    everyone = (0, 1, 2, 3)
    found, *_ = run(ranks, checks, forgets_to_wait, everyone, names=(name,))
    assert found[name].state == "fault"
    assert "when the hop returned: a missing wait" in found[name].saw


def swaps_two_ranks() -> AbstractContextManager[object]:
    """Data of two peers is swapped on arrival."""
    right = wire._swap

    def wrong(group: Any, messages: dict[int, tuple[Tensor, Tensor]], tag: int) -> list[dist.Work]:
        (first, (sent, into)), (second, (also_sent, also_into)), *others = messages.items()
        return right(group, {first: (sent, also_into), second: (also_sent, into), **dict(others)}, tag)

    return patch.object(wire, "_swap", wrong)


def test_a_hop_that_swaps_two_ranks_is_named(ranks: Ranks) -> None:
    found, *_ = run(ranks, checks, swaps_two_ranks, (3,), 4, ("hop in-node",))
    assert found["hop in-node"].state == "fault"
    message = "rank 3: all_gather in-node, round 0: data of rank 1 instead of data of rank 0"
    assert message in found["hop in-node"].saw


def loses_a_word() -> AbstractContextManager[object]:
    """The end of a long message arrives as zeros."""
    right = wire._swap

    def wrong(group: Any, messages: dict[int, tuple[Tensor, Tensor]], tag: int) -> list[dist.Work]:
        changed = {peer: (sent.clone(), into) for peer, (sent, into) in messages.items()}
        for sent, _ in changed.values():
            sent[1000:] = 0
        return right(group, changed, tag)

    return patch.object(wire, "_swap", wrong)


def test_a_wrong_word_is_named(ranks: Ranks) -> None:
    found, *_ = run(ranks, checks, loses_a_word, (1,), names=("hop across",))
    message = "rank 3: all_gather across, round 1: 21 wrong words after correct headers"
    assert message in found["hop across"].saw


def adds_wrongly() -> AbstractContextManager[object]:
    right = dist.reduce_scatter_single

    def wrong(out: Tensor, rows: Tensor) -> None:
        right(out, rows)
        out[-1] += 1

    return patch.object(dist, "reduce_scatter_single", wrong)


def test_a_wrong_sum_is_named(ranks: Ranks) -> None:
    found, *_ = run(ranks, checks, adds_wrongly, (2,), names=("sums",))
    assert "rank 2: FSDP2's reduce-scatter, round 0: 1 of 5 sums are wrong" in found["sums"].saw


def test_messages_differ_by_sender_receiver_and_round(ranks: Ranks) -> None:
    (different,) = ranks.run(count_messages, world=1)
    assert different == 3 * 3 * 3


def count_messages() -> int:
    from zeropp.tools.doctor.check import Session

    session = Session.begin(DoctorSettings(), HANG_SECONDS)
    message = partial(
        collectives.Carrier(session, session.topology.flat_hop(), "all_gather")._message, words=9
    )
    tails = [message(s, r, n)[collectives.HEADER :] for s in range(3) for r in range(3) for n in range(3)]
    return len({tuple(tail.tolist()) for tail in torch.stack(tails)})
