"""Small benchmarks on real links."""

from __future__ import annotations

import pytest

from zeropp.tools.bench.run import BenchSettings, run_bench
from zeropp.tools.bench.workload import Workload

SMALL = Workload(layers=2, width=128, context=32, batch=1)
TINY = Workload(layers=1, width=64, context=32, batch=1)


def test_a_small_benchmark_measures_every_strategy() -> None:
    shares: list[float] = []
    saved: list[int] = []
    strategies = ("fsdp2", "wire16", "wire16-accumulate", "hsdp", "default")
    results = run_bench(
        BenchSettings(
            link="500mbit",
            micro_batches=(1, 2),
            strategies=strategies,
            rounds=1,
            loss_steps=3,
            workload=SMALL,
        ),
        lambda what, share: shares.append(share),
        lambda results: saved.append(len(results.cells)),
    )
    assert saved == [5, 10]
    assert shares == sorted(shares)
    assert 0.9 < shares[-1] <= 1.0
    assert results.failed == {}
    assert {(cell.strategy, cell.micro_batches) for cell in results.cells} == {
        (r, k) for r in strategies for k in (1, 2)
    }
    sent = {(c.strategy, c.micro_batches): c.sent_bytes / results.parameters for c in results.cells}
    assert sent["default", 2] == pytest.approx(sent["default", 1], rel=0.05)  # accumulation is free
    assert sent["default", 1] < 0.85
    assert sent["wire16", 2] == pytest.approx(2 * sent["wire16", 1], rel=0.05)
    assert sent["wire16-accumulate", 2] < sent["wire16", 2]
    assert sent["hsdp", 2] == pytest.approx(2.0, rel=0.1)
    for cell in results.cells:
        assert cell.median_ms > 0
        assert results.limit_ms(cell) > results.compute_median_ms(cell.micro_batches) > 0
        assert cell.peak_bytes > 0
        assert cell.model_state_bytes > 0
        assert cell.parts_ms["compute"] > 0
        (stolen,) = cell.stolen  # one round
        assert 0 <= stolen < 1
        if cell.ledger_bytes is not None:
            assert cell.sent_bytes == pytest.approx(cell.ledger_bytes, rel=0.05)
    states = {cell.strategy: cell.model_state_bytes for cell in results.cells}
    assert states["hsdp"] == pytest.approx(2 * states["fsdp2"], rel=0.02)
    assert results.losses["wire16"] == results.losses["wire16-accumulate"]  # the same without accumulation
    assert results.losses["fsdp2"][0] == pytest.approx(results.losses["default"][0], rel=0.02)
    assert len(results.other_seed_losses) == 3


def test_a_strategy_that_chooses_does_so_before_it_is_measured() -> None:
    settings = BenchSettings(
        ranks_per_node=1,
        link="1gbit",
        micro_batches=(1,),
        strategies=("auto",),
        rounds=1,
        loss_steps=0,
        workload=TINY,
    )
    (cell,) = run_bench(settings, lambda what, share: None).cells
    assert len(cell.chosen) == 1
    assert len(cell.step_ms) == 4


def test_invalid_settings_are_named() -> None:
    with pytest.raises(ValueError, match="regime is 'glacial'; expected one of paper, slow, fast"):
        BenchSettings(regime="glacial")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a benchmark needs a rate"):
        BenchSettings(link="unlimited")
    with pytest.raises(ValueError, match=r"micro_batches is \(0,\)"):
        BenchSettings(micro_batches=(0,))
    with pytest.raises(ValueError, match="strategy is 'x'"):
        BenchSettings(strategies=("x",))
