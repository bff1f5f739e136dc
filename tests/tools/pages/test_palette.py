from __future__ import annotations

import re

import pytest

from zeropp.tools.pages.page import COLORS
from zeropp.tools.pages.palette import OTHERS, PART_COLORS, STRATEGY_COLORS, WORK_COLORS, colors_of
from zeropp.tools.plan.recommend import COMPARED
from zeropp.tools.strategies import STRATEGIES

PAPERS = re.findall(r"--paper: (#\w+);", COLORS)


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2."""
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_every_strategy_has_its_own_color() -> None:
    names = {strategy.name for strategy in (*STRATEGIES, *COMPARED)}
    assert names == set(STRATEGY_COLORS)
    assert len({*STRATEGY_COLORS.values(), *OTHERS}) == len(STRATEGY_COLORS) + len(OTHERS)


@pytest.mark.parametrize("paper", PAPERS)
def test_colors_have_contrast_in_light_and_dark(paper: str) -> None:
    assert len(PAPERS) == 2
    colors = [*STRATEGY_COLORS.values(), *OTHERS, *WORK_COLORS.values(), *PART_COLORS.values()]
    assert [color for color in colors if contrast(color, paper) < 2.4] == []


def test_runs_without_a_name_get_different_colors() -> None:
    found = colors_of([None, None, "default", None])
    assert len(set(found)) == 4
    assert found[2] == STRATEGY_COLORS["default"]
    assert len(colors_of([None] * 20)) == 20
