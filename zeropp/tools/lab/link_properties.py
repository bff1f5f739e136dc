"""Parsers of link properties: "1gbit", "20ms", "1%"."""

from __future__ import annotations

import re

UNLIMITED = "unlimited"
RATE_SUFFIXES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
DELAY_SUFFIXES_US = {"us": 1, "ms": 10**3, "s": 10**6}
MIN_RATE_BIT_S, MAX_RATE_BIT_S = 10**4, 32 * 10**9  # tbf counts bytes per second in 32 bits
MAX_DELAY_US = 10 * 10**6


def parse_rate_bit_s(text: str) -> int | None:
    """Return bits per second, or None for an unlimited link.

    >>> parse_rate_bit_s("1gbit"), parse_rate_bit_s("2.5mbit"), parse_rate_bit_s("unlimited")
    (1000000000, 2500000, None)
    """
    if text == UNLIMITED:
        return None
    rate_bit_s = _parse(text, RATE_SUFFIXES)
    if rate_bit_s is None or not MIN_RATE_BIT_S <= rate_bit_s <= MAX_RATE_BIT_S:
        raise ValueError(
            f"link is {text!r}; expected a rate from 10kbit to 32gbit, such as '300mbit' or '1gbit', "
            f"or {UNLIMITED!r}"
        )
    return round(rate_bit_s)


def parse_delay_us(text: str, most_us: int = MAX_DELAY_US) -> int:
    """Return microseconds.

    >>> parse_delay_us("20ms")
    20000
    """
    delay_us = _parse(text, DELAY_SUFFIXES_US)
    if delay_us is None or delay_us > most_us:
        most = f"{most_us // 10**6}s"
        raise ValueError(f"time is {text!r}; expected a time from 0ms to {most}, such as '20ms' or '150us'")
    return round(delay_us)


def parse_loss_percent(text: str) -> float:
    """Return percent.

    >>> parse_loss_percent("0.5%")
    0.5
    """
    loss_percent = _parse(text, {"%": 1})
    if loss_percent is None or loss_percent > 100:
        raise ValueError(f"loss is {text!r}; expected a percentage from 0% to 100%, such as '1%'")
    return loss_percent


def format_rate(rate_bit_s: int | None) -> str:
    """Return the inverse of `parse_rate_bit_s`, rounded to three digits.

    >>> format_rate(312_500_000), format_rate(1_250_000_000), format_rate(999_600_000), format_rate(None)
    ('312mbit', '1.25gbit', '1gbit', 'unlimited')
    """
    if rate_bit_s is None:
        return UNLIMITED
    rounded = float(f"{rate_bit_s:.3g}")  # rounded before the choice of the suffix: 999.6mbit is 1gbit
    suffix, bits = next(
        ((s, b) for s, b in reversed(RATE_SUFFIXES.items()) if rounded >= b), ("bit", RATE_SUFFIXES["bit"])
    )
    return f"{rounded / bits:.3g}{suffix}"


def _parse(text: str, suffixes: dict[str, int]) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z%]+)", text) if isinstance(text, str) else None
    if match is None or match[2] not in suffixes:
        return None
    return float(match[1]) * suffixes[match[2]]
