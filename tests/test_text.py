"""Numbers in sentences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp._text import UNITS, count, parameters, size, some

FACTORS = {letter: factor for factor, letter in UNITS} | {"B": 1e9}


@given(st.floats(1, 1e14))
def test_what_is_said_is_what_was_given(number: float) -> None:
    said = parameters(number)
    factor = FACTORS.get(said[-1], 1.0)
    assert float(said.rstrip("TBMk")) * factor == pytest.approx(number, rel=0.006)
    value, unit = size(number).split()
    factor = 1.0 if unit == "bytes" else FACTORS[unit[0].replace("B", "")]
    assert float(value) * factor == pytest.approx(number, rel=0.006)


def test_one_of_a_kind_and_many() -> None:
    assert [count(number, "node") for number in (0, 1, 1000)] == ["0 nodes", "1 node", "1,000 nodes"]
    assert some([f"blocks.{n}" for n in range(12)]) == "blocks.0, blocks.1, blocks.2 and 9 more"
