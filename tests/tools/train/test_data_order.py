from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp.tools.train.data_order import Shuffle


@given(size=st.integers(1, 700), key=st.text(max_size=5))
def test_it_is_a_permutation(size: int, key: str) -> None:
    order = Shuffle(size, key)
    assert sorted(order[n] for n in range(size)) == list(range(size))


def test_places_are_spread_evenly() -> None:
    """Each tenth of the range gets its share of the first 100 places of 64 orders: a chi-square test."""
    size, counts = 1000, [0] * 10
    for key in range(64):
        order = Shuffle(size, f"{key}")
        for n in range(100):
            counts[order[n] * 10 // size] += 1
    chi_square = sum((count - 640) ** 2 / 640 for count in counts)
    assert chi_square < 27.9  # 9 degrees of freedom: one in a thousand by chance. Keys are fixed, so is this.


def test_it_reaches_sizes_that_could_not_be_stored() -> None:
    order = Shuffle(10**15, "large")
    places = {order[n] for n in range(1000)}
    assert len(places) == 1000
    assert max(places) > 9 * 10**14


@pytest.mark.parametrize("n", [-1, 5])
def test_there_is_nothing_outside(n: int) -> None:
    with pytest.raises(IndexError, match=f"{n} is not in 0 .. 4"):
        Shuffle(5, "key")[n]
