from __future__ import annotations

import re

from zeropp.report import render_bench

from ..bench.samples import sample_results


def test_the_report_is_one_file_that_loads_nothing() -> None:
    page = render_bench(sample_results())
    assert page.startswith("<!doctype html>")
    assert not re.findall(r"<script[^>]*\bsrc=|<link[^>]*\bhref=", page)
    assert page.count('id="figure-') == 7  # two of each table, bytes, memory, losses
    assert page.count("<table>") == 4


def test_the_report_says_what_the_tables_say() -> None:
    page = render_bench(sample_results())
    assert "80mbit" in page
    assert "200 ± 20 *" in page
    assert "faster than our default: HSDP, gradients as bf16" in page
    assert "DeepSpeed is not installed" in page
