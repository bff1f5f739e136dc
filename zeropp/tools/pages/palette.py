"""Colors: one per strategy, the same on every page, and one per kind of work in timelines.

All of them can be told from white and from near black, so a page has the same ones in light and dark.
"""

from __future__ import annotations

from collections.abc import Iterable

OURS = "#0f9d58"
"""The only saturated one among the strategies: zeropp's default."""
PLAIN = "#7c8798"

STRATEGY_COLORS = {
    "fsdp2": PLAIN,
    "fsdp2-accumulate": "#98856f",
    "fsdp2-reshard": "#6f7fa8",
    "wire16": "#5f6b7c",
    "wire16-overlap": "#6b8fc2",
    "wire16-accumulate": "#4c74b5",
    "wire16-two-hop": "#8aa0bf",
    "wire16-reshard": "#7a8fd0",
    "hsdp": "#b5803a",
    "hfsdp": "#c79a3b",
    "qwz": "#4f9fa6",
    "hpz": "#3b8c8c",
    "qgz": "#64aeb0",
    "paper": "#8a6fc0",
    "default": OURS,
    "default-serial": "#4fa97d",
    "unrotated": "#6bab8a",
    "four-bit": "#7fa32a",
    "auto": "#1f9aa0",
    "deepspeed": "#b8667f",
    "deepspeed-hpz": "#c9879a",
}
"""Colours by the name of the strategy."""
OTHERS = ("#a56fb0", "#c06a4a", "#5f93b5", "#a3934f", "#b07a9c", "#7d9a6a")
"""For runs whose Config has no name, one after the other."""

WORK_COLORS = {
    "compute": "#5b86b8",
    "codec": "#a878b5",
    "in-node link": "#5fa98a",
    "across link": "#d0503f",
}
"""What a step spends its time on. Red is what zeropp is there to avoid."""
PART_COLORS = {
    "encode": "#a878b5",
    "recode": "#8f5fa0",
    "decode": "#bf93ca",
    "weights in-node": "#5fa98a",
    "gradients in-node": "#3f8c6c",
    "weights across": "#d0503f",
    "gradients across": "#e07a5f",
    "weights flat": "#c4612f",
    "gradients flat": "#d98e4a",
    "wait": "#b3a13c",
    "other collectives": "#b0607a",
    "compute": "#5b86b8",
}
"""The same for the parts of a measured step."""


def colors_of(strategies: Iterable[str | None]) -> list[str]:
    """A color for each, by its name; None: it has none, and gets one that nothing else has.

    >>> colors_of(["default", None, "fsdp2"])
    ['#0f9d58', '#a56fb0', '#7c8798']
    """
    others = iter(OTHERS)
    return [STRATEGY_COLORS.get(name or "") or next(others, PLAIN) for name in strategies]
