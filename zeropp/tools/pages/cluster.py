"""Picture of the two hops of a cluster: nodes below each other, with the rails between them.

A rail is the group of ranks with equal position, one of each node, which the hop across connects.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from .charts import Chart
from .palette import WORK_COLORS

NODE_HEIGHT, GAP = 104, 88
MAX_RANKS = 4
"""Number of drawn ranks per node. The first and the last node are drawn; texts give the number of others."""
WIDEST = 14
"""Width in pixels of the link that carries the most bytes."""


class Carried(NamedTuple):
    """Bytes that one rank sends on one kind of link, with a description."""

    text: str
    sent_bytes: float


def draw_cluster(
    title: str,
    nodes: Sequence[Sequence[int]],
    in_node: Carried,
    across: Carried,
    most_bytes: float | None = None,
    note: str = "",
) -> Chart:
    """Draw the ranks by node. The width of a link is proportional to its bytes; `most_bytes` has `WIDEST`."""
    most = most_bytes or max(in_node.sent_bytes, across.sent_bytes) or 1.0
    first, last = nodes[0], nodes[-1]
    drawn = [_node(0, 0, first, in_node, most)]
    height = NODE_HEIGHT
    if len(nodes) > 1:
        height = 2 * NODE_HEIGHT + GAP
        shown = min(len(first), MAX_RANKS)
        drawn += [_rail(_center(rank, shown), across, most) for rank in range(shown)]
        middle = NODE_HEIGHT + GAP / 2
        between = f"{len(nodes) - 2} more nodes between; " if len(nodes) > 2 else ""
        drawn.append(_text("50%", middle - 14, between + "across nodes, per rank", "soft"))
        for line, text in enumerate(across.text.split(", ")):
            drawn.append(_text("50%", middle + 4 + 17 * line, text, "strong"))
        drawn.append(_node(len(nodes) - 1, NODE_HEIGHT + GAP, last, in_node, most))
    colors = {
        "link inside a node": WORK_COLORS["in-node link"],
        "link across nodes": WORK_COLORS["across link"],
    }
    return Chart(title, "".join(drawn), height, legend=colors, note=note)


def _node(number: int, top: float, ranks: Sequence[int], in_node: Carried, most: float) -> str:
    shown = list(ranks[:MAX_RANKS])
    width = min(22.0, 64 / len(shown))
    more = f", {len(ranks) - len(shown)} more ranks" if len(ranks) > len(shown) else ""
    drawn = [
        f'<rect class="box" x="1" y="{top + 1}" width="99%" height="{NODE_HEIGHT - 2}" rx="8"/>',
        f'<text class="strong" x="10" y="{top + 18}">node {number}{more}</text>',
    ]
    if len(shown) > 1:
        left, right = _center(0, len(shown)), _center(len(shown) - 1, len(shown))
        drawn.append(
            f'<line x1="{left:.2f}%" x2="{right:.2f}%" y1="{top + 46}" y2="{top + 46}" '
            f'stroke="{WORK_COLORS["in-node link"]}" stroke-width="{_thickness(in_node, most):.1f}" '
            f'data-tip="{escape(in_node.text)}"/>'
        )
    for position, rank in enumerate(shown):
        center = _center(position, len(shown))
        drawn.append(
            f'<rect class="rank" x="{center - width / 2:.2f}%" y="{top + 32}" width="{width:.2f}%" '
            'height="28" rx="5"/>'
        )
        drawn.append(_text(f"{center:.2f}%", top + 51, f"rank {rank}" if len(shown) < 4 else str(rank)))
    if len(shown) > 1:
        drawn.append(_text("50%", top + 78, "inside the node, per rank", "soft"))
        drawn.append(_text("50%", top + 94, in_node.text, "strong"))
    return "".join(drawn)


def _rail(center: float, across: Carried, most: float) -> str:
    return (
        f'<line x1="{center:.2f}%" x2="{center:.2f}%" y1="{NODE_HEIGHT}" y2="{NODE_HEIGHT + GAP}" '
        f'stroke="{WORK_COLORS["across link"]}" stroke-width="{_thickness(across, most):.1f}" '
        f'data-tip="{escape(across.text)}"/>'
    )


def _center(position: int, count: int) -> float:
    """Return the middle of a rank, in percent. Text fits between the rails of two ranks."""
    return 50.0 if count == 1 else 15 + 70 * position / (count - 1)


def _thickness(carried: Carried, most: float) -> float:
    return max(1.0, WIDEST * carried.sent_bytes / most)


def _text(x: str, y: float, text: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x}" y="{y}" text-anchor="middle"{kind}>{escape(text)}</text>'
