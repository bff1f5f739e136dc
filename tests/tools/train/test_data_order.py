from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp.tools.train.data_order import Shuffle


@given(size=st.integers(1, 700), key=st.text(max_size=5))
def test_it_is_a_permutation(size: int, key: str) -> None:
    order = Shuffle(size, key)
    assert sorted(order[n] for n in range(size)) == list(range(size))


def test_positions_are_spread_evenly() -> None:
    """A chi-square test: each tenth of the range gets its share of the first 100 elements of 64 orders."""
    size, counts = 1000, [0] * 10
    for key in range(64):
        order = Shuffle(size, f"{key}")
        for n in range(100):
            counts[order[n] * 10 // size] += 1
    chi_square = sum((count - 640) ** 2 / 640 for count in counts)
    # 9 degrees of freedom: 27.9 is exceeded once in a thousand by chance. The keys are fixed, so is the
    # result.
    assert chi_square < 27.9


def test_sizes_that_could_not_be_stored() -> None:
    order = Shuffle(10**15, "large")
    positions = {order[n] for n in range(1000)}
    assert len(positions) == 1000
    assert max(positions) > 9 * 10**14


@pytest.mark.parametrize("n", [-1, 5])
def test_an_index_outside_of_the_range_is_refused(n: int) -> None:
    with pytest.raises(IndexError, match=f"{n} is not in 0 .. 4"):
        Shuffle(5, "key")[n]
