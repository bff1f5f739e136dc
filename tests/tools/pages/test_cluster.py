from __future__ import annotations

import re

from zeropp.tools.pages.cluster import MAX_RANKS, WIDEST, Carried, draw_cluster

INSIDE, ACROSS = Carried("weights 4 kB", 4000.0), Carried("weights 1 kB", 1000.0)


def test_link_widths_are_proportional_to_bytes() -> None:
    body = draw_cluster("", [[0, 1], [2, 3]], INSIDE, ACROSS).body
    assert re.findall(r'stroke-width="([\d.]+)"', body) == [f"{w:.1f}" for w in (WIDEST, 3.5, 3.5, WIDEST)]
    assert all(f"rank {rank}" in body for rank in range(4))
    assert body.count("weights 1 kB</text>") == 1


def test_texts_count_what_is_not_drawn() -> None:
    body = draw_cluster("", [list(range(8 * node, 8 * node + 8)) for node in range(5)], INSIDE, ACROSS).body
    assert body.count('class="rank"') == 2 * MAX_RANKS
    assert "4 more ranks" in body
    assert "3 more nodes between" in body
    assert "node 4" in body


def test_one_node_has_no_rails() -> None:
    chart = draw_cluster("", [[0]], INSIDE, Carried("nothing", 0.0))
    assert "stroke-width" not in chart.body
    assert "nothing" not in chart.body
