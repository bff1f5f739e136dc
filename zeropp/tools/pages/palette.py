"""Colors: one per strategy, the same on every page, and one per kind of work in timelines.

All colors have enough contrast to white and to near black, so light and dark pages share them.
"""

from __future__ import annotations

from collections.abc import Iterable

OURS = "#0f9d58"
"""Color of zeropp's default, the only saturated color of a strategy."""
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
"""Colors by the name of the strategy."""
OTHERS = ("#a56fb0", "#c06a4a", "#5f93b5", "#a3934f", "#b07a9c", "#7d9a6a")
"""Colors of runs whose Config has no name, in order."""

WORK_COLORS = {
    "compute": "#5b86b8",
    "codec": "#a878b5",
    "in-node link": "#5fa98a",
    "across link": "#d0503f",
}
"""Colors of the kinds of work in a step. Cross-node traffic, which zeropp reduces, is red."""
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
"""Colors of the parts of a measured step."""


def colors_of(strategies: Iterable[str | None]) -> list[str]:
    """Return a color for each name. None stands for a Config without a name, and gets an unused color.

    >>> colors_of(["default", None, "fsdp2"])
    ['#0f9d58', '#a56fb0', '#7c8798']
    """
    others = iter(OTHERS)
    return [STRATEGY_COLORS.get(name or "") or next(others, PLAIN) for name in strategies]
