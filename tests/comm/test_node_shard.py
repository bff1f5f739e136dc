from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeropp.comm import Alarm, NodeShard, StaleWeightsError
from zeropp.comm.node_shard import Send, fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]


@given(
    numel=st.integers(1, 5000) | st.just(100_003),
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 9),
    data=st.data(),
)
def test_one_changed_element_changes_the_fingerprint(
    numel: int, dtype: torch.dtype, offset: int, data: st.DataObject
) -> None:
    shard = torch.randint(1, 100, (numel + offset,)).to(dtype)[offset:]  # at any alignment
    before = fingerprint(shard)
    assert torch.equal(before, fingerprint(shard))
    position = data.draw(st.integers(0, numel - 1))
    shard[position] += 1
    assert not torch.equal(before, fingerprint(shard))


def test_edits_of_everything_change_it() -> None:
    weights = torch.randn(64, 4099)
    before = fingerprint(weights.flatten())
    for changed in (-weights, weights * 0.5, weights.roll(1, 0), weights.flip(0), weights.roll(1, 1)):
        assert not torch.equal(before, fingerprint(changed.flatten()))


def test_a_fingerprint_is_small() -> None:
    assert fingerprint(torch.zeros(3_000_000)).numel() <= 3 * 8 * 1021


def filled() -> tuple[NodeShard, torch.Tensor]:
    shard = torch.randn(3000)
    node_shard = NodeShard("layers.7")
    node_shard.buffer(0, 2, 64, shard.device).zero_()
    node_shard.gathered(Send.WEIGHTS, fingerprint(shard))
    return node_shard, shard


@pytest.mark.parametrize("takes_differences", [False, True])
def test_what_a_gather_sends_follows_from_what_happened(takes_differences: bool) -> None:
    node_shard = NodeShard("layers.7", takes_differences=takes_differences, refresh_every=2)
    source = fingerprint(torch.zeros(10))
    sent = []

    def gather() -> None:
        sent.append(send := node_shard.next_send)
        if send is not Send.NOTHING:
            node_shard.gathered(send, source)

    gather()
    gather()
    for _ in range(4):
        node_shard.weights_changed()
        gather()
    node_shard.weights_changed()
    node_shard.invalidate()
    gather()
    node_shard.invalidate()
    node_shard.weights_changed()  # is still of no use
    gather()
    weights, nothing = Send.WEIGHTS, Send.NOTHING
    changed = Send.DIFFERENCE if takes_differences else weights
    assert sent == [weights, nothing, changed, changed, weights, changed, weights, weights]


def test_a_version_that_moved_by_itself_is_a_change_of_all() -> None:
    version = 0
    node_shard = NodeShard("layers.7", takes_differences=True, weights_version=lambda: version)
    sent = []

    def gather() -> None:
        node_shard.prepare(is_early=False, device=torch.device("cpu"))
        sent.append(send := node_shard.next_send)
        if send is not Send.NOTHING:
            node_shard.gathered(send, fingerprint(torch.zeros(10)))

    gather()
    version += 1  # an optimizer that moves it, and says so
    node_shard.weights_changed()
    gather()
    gather()
    version += 1  # a load into the parameters
    gather()
    version += 1
    node_shard.weights_changed()
    version += 1  # a load right after a step
    gather()
    assert sent == [Send.WEIGHTS, Send.DIFFERENCE, Send.NOTHING, Send.WEIGHTS, Send.WEIGHTS]


def test_a_checkpoint_holds_only_what_has_a_history() -> None:
    node_shard = NodeShard("layers.7", takes_differences=True)
    assert node_shard.state_dict(0) == {}
    node_shard.buffer(0, 2, 16, torch.device("cpu")).copy_(torch.arange(32).view(2, 16))
    node_shard.gathered(Send.WEIGHTS, fingerprint(torch.zeros(10)))
    node_shard.weights_changed()
    saved = node_shard.state_dict(1)
    assert torch.equal(saved["rows"][0], torch.arange(16, 32, dtype=torch.uint8))
    other = NodeShard("layers.7", takes_differences=True)
    other.load_state_dict(saved)
    assert other.next_send is Send.DIFFERENCE
    plain, _ = filled()
    plain.weights_changed()
    assert plain.state_dict(0) == {}  # without differences, nothing


def test_on_cpu_a_mismatch_raises_at_once() -> None:
    node_shard, shard = filled()
    alarm = Alarm()
    node_shard.check(shard, alarm)
    shard[5] = 7.0
    with pytest.raises(StaleWeightsError, match=r"unit 'layers.7'.*call invalidate\(\) on every rank"):
        node_shard.check(shard, alarm)
    node_shard.invalidate()
    assert node_shard.next_send is Send.WEIGHTS


def test_a_shard_of_another_size_is_a_mismatch() -> None:
    node_shard, shard = filled()
    with pytest.raises(StaleWeightsError):
        node_shard.check(shard[:2000], Alarm())


def test_memory_made_in_inference_mode_can_be_written_in_training() -> None:
    node_shard = NodeShard("unit")
    with torch.inference_mode():
        node_shard.buffer(0, 2, 64, torch.device("cpu"))
    buffer = node_shard.buffer(0, 2, 64, torch.device("cpu"))
    assert not buffer.is_inference()
    assert node_shard.nbytes == 128
