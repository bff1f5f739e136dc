from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zeropp.comm.column_groups import Weight, buffer_of, column_groups, split_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64]
WEIGHTS = st.lists(
    st.builds(Weight, st.integers(0, 40), st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=8
).filter(lambda weights: any(weight.numel for weight in weights))


def as_fsdp2_packs(parameters: list[Tensor]) -> Tensor:
    """Shards of parameters, one after the other; as raw bytes, if there are several dtypes."""
    if len({p.dtype for p in parameters}) == 1:
        return torch.cat(parameters)
    return torch.cat([p.view(torch.uint8) for p in parameters])


@given(WEIGHTS, st.integers(0, 3))
def test_groups_are_the_parameters_of_one_dtype_that_are_trained_alike(
    weights: list[Weight], before: int
) -> None:
    parameters = [torch.randint(0, 100, (w.numel,)).to(w.dtype) for w in weights]
    shard = as_fsdp2_packs(parameters)
    assert buffer_of(weights) == (shard.numel(), shard.dtype)
    shard = torch.cat([shard[:before], shard])[min(before, shard.numel()) :]  # at any alignment
    groups = column_groups(weights, [split_of(weights)], *buffer_of(weights))
    seen = []
    for group in groups:
        assert group.members is not None
        members = sorted(group.members)
        assert len({(weights[i].dtype, weights[i].is_trained) for i in members}) == 1
        packed = group.pack(shard)
        assert packed.dtype == group.dtype
        assert torch.equal(packed, torch.cat([parameters[i] for i in members]))
        assert group.lengths == tuple(weights[i].numel for i in members)
        assert group.numel == sum(group.lengths)
        columns = [stretch.columns for stretch in group.stretches]
        assert all(first.stop < second.start for first, second in pairwise(columns))
        seen += [i for at in columns for i in range(at.start, at.stop)]
        for stretch in group.stretches:
            length = stretch.at.stop - stretch.at.start
            cut = group.pack(shard)[stretch.at]
            assert stretch.columns_of(stretch.at.start, stretch.at.stop) == stretch.columns
            middle = stretch.at.start + length // 2
            first, last = (
                stretch.columns_of(stretch.at.start, middle),
                stretch.columns_of(middle, stretch.at.stop),
            )
            assert (first.start, first.stop, last.stop) == (
                stretch.columns.start,
                last.start,
                stretch.columns.stop,
            )
            assert cut.numel() == length
    assert sorted(seen) == list(range(shard.numel()))
    kinds = {(w.dtype, w.is_trained) for w in weights if w.numel}
    assert len(groups) == len(kinds)


def test_one_kind_is_the_shard_itself() -> None:
    weights = [Weight(3, torch.float32), Weight(0, torch.float32), Weight(5, torch.float32)]
    (group,) = column_groups(weights, [split_of(weights)], 8, torch.float32)
    shard = torch.randn(8)
    assert group.pack(shard).data_ptr() == shard.data_ptr()
    assert group.edges == ()


def test_a_buffer_of_another_size_is_one_group() -> None:
    (group,) = column_groups([Weight(3, torch.float32)], [(True,)], 9, torch.uint8)
    assert (group.dtype, group.numel, group.lengths) == (torch.uint8, 9, ())
    assert group.has_any_of({7})


def test_a_group_has_what_is_its_own() -> None:
    weights = [Weight(3, torch.float32, False), Weight(4, torch.float32)]
    frozen, trained = column_groups(weights, [split_of(weights)], 7, torch.float32)
    assert (frozen.has_any_of({1}), trained.has_any_of({1}), frozen.has_any_of(None)) == (False, True, True)


def test_a_group_is_split_by_what_was_trained_at_some_time() -> None:
    weights = [Weight(2, torch.float32)] * 3
    (whole,) = column_groups(weights, [(True, True, True)], 6, torch.float32)
    assert not whole.is_split_by((False, False, False))
    assert whole.is_split_by((False, True, False))
    groups = column_groups(weights, [(True, False, False), (False, True, False)], 6, torch.float32)
    assert [group.members for group in groups] == [frozenset({number}) for number in range(3)]
    assert not any(group.is_split_by((False, True, True)) for group in groups)
