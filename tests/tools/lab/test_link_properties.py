from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp.tools.lab.link_properties import (
    MAX_RATE_BIT_S,
    MIN_RATE_BIT_S,
    format_rate,
    parse_delay_us,
    parse_loss_percent,
    parse_rate_bit_s,
)


@pytest.mark.parametrize("text", ["", "1", "1 gbit", "1Gbit", "-1gbit", "1gb", "9kbit", "33gbit", "fast"])
def test_invalid_rates_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"link is '{text}'; expected a rate from 10kbit to 32gbit"):
        parse_rate_bit_s(text)


@pytest.mark.parametrize("text", ["20", "20min", "11s", "ms"])
def test_invalid_delays_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"time is '{text}'; expected a time from 0ms to 10s"):
        parse_delay_us(text)


@pytest.mark.parametrize("text", ["1", "101%", "0.01"])
def test_invalid_losses_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"loss is '{text}'; expected a percentage from 0% to 100%"):
        parse_loss_percent(text)


@pytest.mark.parametrize("text", ["10kbit", "2.5mbit", "300mbit", "1gbit", "unlimited"])
def test_rates_survive_formatting(text: str) -> None:
    assert format_rate(parse_rate_bit_s(text)) == text


@given(rate_bit_s=st.integers(MIN_RATE_BIT_S, MAX_RATE_BIT_S))
def test_every_rate_is_formatted_to_three_digits(rate_bit_s: int) -> None:
    assert parse_rate_bit_s(format_rate(rate_bit_s)) == pytest.approx(rate_bit_s, rel=0.005)
