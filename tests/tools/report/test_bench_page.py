from __future__ import annotations

import re

from tests.tools.bench.samples import sample_results
from zeropp.tools.report import render_bench
from zeropp.tools.report.bench_page import headline


def test_the_report_is_self_contained() -> None:
    page = render_bench(sample_results())
    assert page.startswith("<!doctype html>")
    assert not re.findall(r"\bsrc=|\bhref=", page)
    assert (
        page.count("<figure>") == 9
    )  # steps, bytes, parts and memory of each number of micro-batches; losses
    assert page.count("<table>") == 4
    assert len(page) < 100_000


def test_the_report_has_the_text_of_the_tables() -> None:
    page = render_bench(sample_results())
    assert "80mbit" in page
    assert "200 ± 20 *" in page
    assert "faster than our default: HSDP, gradients as bf16" in page
    assert "DeepSpeed is not installed" in page


def test_the_result_in_words() -> None:
    results = sample_results()
    assert headline(results) == (
        "0.44x to 3.50x the throughput of 16-bit FSDP2, 6.49x fewer bytes across nodes, same loss; "
        "HSDP, gradients as bf16 is faster with 8 micro-batches per step"
    )
    results.losses["default"][-1] = 2.5
    assert "across nodes, loss +0.5000; HSDP" in headline(results)
    results.cells = [cell for cell in results.cells if cell.strategy != "default"]
    assert "the default or the baseline was not run" in headline(results)
