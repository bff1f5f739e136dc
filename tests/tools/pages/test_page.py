from __future__ import annotations

import re

from zeropp.tools.pages import Bar, BarPart, bars, figure, figures, page, table


def test_text_is_escaped() -> None:
    html = page("a <b>", "c & d", [])
    assert "<title>a &lt;b&gt;: c &amp; d</title>" in html
    assert "<h1>c &amp; d</h1>" in html
    assert "<td>1 &lt; 2</td>" in table([["x"], ["1 < 2"]])
    assert "&lt;i&gt;" in figure(bars("<i>", [Bar("<b>", "1 < 2", (BarPart(1.0, "red", '"'),))], "ms"))


def test_a_line_has_the_class_of_its_first_cell() -> None:
    html = table([["name", "ms"], ["ours", "1"], ["theirs", "2"]], lambda name: f"class-{name}")
    assert '<tr class="class-ours"><td>ours</td><td>1</td></tr>' in html
    assert "<th>name</th><th>ms</th>" in html


def test_a_page_loads_nothing() -> None:
    html = page("a", "b", [figures(bars("c", [], "ms"))])
    assert not re.findall(r"\bsrc=|\bhref=|@import|url\(", html)
