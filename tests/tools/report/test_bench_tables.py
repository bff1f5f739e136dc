from __future__ import annotations

from tests.tools.bench.samples import sample_results
from zeropp.comm.ledger import render
from zeropp.tools.report.bench_tables import COLUMNS, bench_tables, main_lines, parts_lines


def test_main_lines_have_every_column_and_mark_the_best() -> None:
    by_title = {line[0]: dict(zip(COLUMNS, line, strict=True)) for line in main_lines(sample_results(), 1)}
    ours = by_title["zeropp's default"]
    assert ours == {
        "": "zeropp's default",
        "step ms": "200 ± 20 *",
        "vs baseline": "3.50x",
        "limit ms": "140",
        "step / limit": "1.42",
        "cores ms": "60",
        "bytes": "0.77 *",
        "ledger": "0.77",
        "loss": "2.0100",
        "peak MiB": "400",
        "state": "50",
        "comm.": "1",
    }
    assert by_title["FSDP2, 16-bit wire, serial: the baseline"]["peak MiB"] == "300 *"
    assert by_title["HSDP, gradients as bf16"]["ledger"] == "-"
    assert by_title["DeepSpeed ZeRO-3 (fp32)"]["step ms"] == "not run"


def test_a_rival_that_wins_has_the_star() -> None:
    by_title = {line[0]: line[1] for line in main_lines(sample_results(), 8)}
    assert by_title["HSDP, gradients as bf16"].endswith("*")
    assert not by_title["zeropp's default"].endswith("*")


def test_parts_that_no_strategy_has_are_left_out() -> None:
    head, *lines = parts_lines(sample_results(), 1)
    assert head == ["", "encode", "compute"]
    assert ["zeropp's default", "10", "100"] in lines


def test_tables_of_all_micro_batches() -> None:
    text = "".join(render(table) for table in bench_tables(sample_results()))
    assert "1 micro-batch per step" in text
    assert "8 micro-batches per step" in text
