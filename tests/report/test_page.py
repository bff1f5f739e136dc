from __future__ import annotations

from zeropp.report.page import Figures, graph_objects, page, table


def test_text_is_escaped() -> None:
    assert "<title>a &lt;b&gt;: c &amp; d</title>" in page("a <b>", "c & d", [])
    assert "<td>1 &lt; 2</td>" in table([["x"], ["1 < 2"]])


def test_a_line_has_the_class_of_its_first_cell() -> None:
    html = table([["name", "ms"], ["ours", "1"], ["theirs", "2"]], lambda name: f"class-{name}")
    assert '<tr class="class-ours"><td>ours</td><td>1</td></tr>' in html
    assert "<th>name</th><th>ms</th>" in html


def test_the_first_figure_brings_the_script() -> None:
    figures = Figures()
    first, second = (figures.add(graph_objects().Figure()) for _ in range(2))
    assert 'id="figure-1"' in first
    assert 'id="figure-2"' in second
    assert len(first) > 1_000_000 > len(second)
