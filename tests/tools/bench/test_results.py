from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.bench.samples import sample_results
from zeropp.tools.bench.results import Cell, Results, verdicts


@pytest.fixture
def results() -> Results:
    return sample_results()


def cell(results: Results, strategy: str, micro_batches: int) -> Cell:
    found = results.cell(strategy, micro_batches)
    assert found is not None
    return found


def test_the_limit_is_compute_and_bytes_at_line_rate(results: Results) -> None:
    assert results.limit_ms(cell(results, "wire16", 1)) == pytest.approx(100 + 500)
    exposed = results.workload.first_and_last_share * 77  # the default overlaps, and compute is longer
    assert results.limit_ms(cell(results, "default", 1)) == pytest.approx(100 + exposed)
    assert results.limit_ms(cell(results, "default", 8)) == pytest.approx(800 + exposed)
    slow = replace(results, link_bit_s=results.link_bit_s // 10)
    last = 100 / results.workload.layers
    assert slow.limit_ms(cell(slow, "default", 1)) == pytest.approx(770 + last)  # and the last block


def test_a_phase_hides_only_its_own_communication(results: Results) -> None:
    """Forward has a third of 100 ms of compute, and sends for 77 ms."""
    forward, backward = 100 / 3, 200 / 3
    default = replace(cell(results, "default", 1), bytes_shares=[1.0, 0.0, 0.0])
    assert results.limit_ms(replace(default, cores_ms=1234.5)) == 1234.5
    last = forward / results.workload.layers
    assert results.limit_ms(default) == pytest.approx(77 + last + backward)
    everywhere = replace(default, bytes_shares=[0.5, 0.5, 0.0])
    exposed = results.workload.first_and_last_share * 77 / 2
    assert results.limit_ms(everywhere) == pytest.approx(
        max(77 / 2 + last, exposed + forward) + exposed + backward
    )
    several = replace(cell(results, "default", 8), bytes_shares=[0.6, *[0.0] * 14, 0.4, 0.0])
    sent = 0.6 * 77  # in the first forward, and the rest in the last backward
    first = max(sent + last, results.workload.first_and_last_share * sent + forward)
    exposed = results.workload.first_and_last_share * 0.4 * 77
    assert results.limit_ms(several) == pytest.approx(first + 800 - forward + exposed)


def test_ratios_are_to_the_16_bit_baseline(results: Results) -> None:
    assert results.speedup(cell(results, "default", 1)) == pytest.approx(3.5)
    assert results.speedup(cell(results, "default", 8)) == pytest.approx(700 / 1600)
    assert results.share(1) == pytest.approx(1 - 100 / 700)


def test_median_and_spread() -> None:
    assert Cell("x", 1, [100.0, 300.0, 110.0]).median_ms == 110.0
    assert Cell("x", 1, [90.0, 100.0, 110.0]).spread == pytest.approx(0.1)
    assert Cell("x", 1, [100.0] * 9 + [1000.0]).spread == 0.0  # one outlier among many


def test_verdicts_mention_that_the_machine_was_not_quiet(results: Results) -> None:
    def found() -> list[str]:
        return [sentence for sentence in verdicts(results) if "not a quiet machine" in sentence]

    assert found() == []
    cell(results, "wire16", 1).stolen = [0.0, 0.01]
    assert found() == []
    cell(results, "default", 1).stolen = [0.1, 0.2]
    assert len(found()) == 1
    assert "up to 15% of its cores' time (while zeropp's default was measured)" in found()[0]


def test_verdicts_name_the_strategies_that_win(results: Results) -> None:
    sentences = verdicts(results)
    assert "1 micro-batch: faster than our default: none" in sentences
    (slower,) = (text for text in sentences if text.startswith("8 micro-batches: faster"))
    assert "HSDP, gradients as bf16 (4.57x), FSDP2, 16-bit wire, serial: the baseline (2.29x)" in slower
    assert any(
        "smaller at its peak than our default (400 MiB): FSDP2, 16-bit wire, serial" in text
        for text in sentences
    )
    assert any("differs from the baseline's by +0.0100; another seed changes" in text for text in sentences)
    assert "not run: DeepSpeed ZeRO-3 (fp32): DeepSpeed is not installed" in sentences
    results.cells.append(replace(cell(results, "default", 8), strategy="auto", chosen=["default"]))
    assert "zeropp's own choice (auto): chose default (8 per step)" in verdicts(results)
    assert any("DeepSpeed qwZ, qgZ: cannot run on CPU" in text for text in sentences)


def test_json_keeps_everything(results: Results, tmp_path: Path) -> None:
    results.save(tmp_path / "bench.json")
    assert Results.load(tmp_path / "bench.json") == results


def test_files_that_call_strategies_rows_can_be_read(results: Results, tmp_path: Path) -> None:
    results.save(tmp_path / "bench.json")
    text = (tmp_path / "bench.json").read_text().replace('"strategy":', '"row":')
    (tmp_path / "bench.json").write_text(text)
    assert Results.load(tmp_path / "bench.json") == results


def test_a_share_that_is_lost_in_noise_has_no_number() -> None:
    results = sample_results()
    assert "(paper: 86% of the baseline's step is communication)" in results.describe()
    assert results.describe().startswith("2 nodes x 2 ranks, 1M parameters, links 80mbit")
    results.compute_ms[1] = [1071.0]  # longer than the baseline's step of 700
    assert results.share(1) == pytest.approx(-0.53)
    assert "the baseline's communication is lost in noise" in results.describe()
    assert "%" not in results.describe()
