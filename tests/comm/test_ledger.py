from __future__ import annotations

from typing import Any

import pytest

import zeropp
from tests.ranks import Ranks
from tests.training import Trainer, make_net
from zeropp.comm import Ledger, Traffic
from zeropp.comm.ledger import CodecWork, WorkKey


def test_totals_filter_and_reset() -> None:
    ledger = Ledger()
    for unit in ("a", "b"):
        ledger.record(unit, "all_gather", "across", wire_bytes=10, across_bytes=10)
        ledger.record(unit, "all_gather", "in-node", wire_bytes=30, across_bytes=0)
        ledger.record(unit, "reduce_scatter", "across", wire_bytes=5, across_bytes=5)
        ledger.record_baseline(unit, "all_gather", wire_bytes=60, across_bytes=20)
    assert ledger.total() == Traffic(calls=6, wire_bytes=90, across_bytes=30)
    assert ledger.total(unit="a", collective="all_gather") == Traffic(2, 40, 10)
    assert ledger.total(hop="in-node") == Traffic(2, 60, 0)
    assert ledger.baseline_total(collective="all_gather") == Traffic(2, 120, 40)
    assert ledger.baseline_total(collective="reduce_scatter") == Traffic()
    ledger.reset()
    assert ledger.total() == Traffic() == ledger.baseline_total()
    assert list(ledger.rows()) == []


def test_the_difference_of_two_ledgers_is_what_came_between() -> None:
    ledger = Ledger()
    key = WorkKey("a", "all_gather", "across", "encode", "int8")
    for unit in ("a", "b"):
        ledger.record(unit, "all_gather", "across", wire_bytes=10, across_bytes=4)
    ledger.record_baseline("a", "all_gather", wire_bytes=60, across_bytes=20)
    ledger.record_work(key, 7)
    before = ledger.copy()
    assert list(ledger.since(before).rows()) == []
    assert list(ledger.since(before).work()) == []
    ledger.record("b", "all_gather", "across", wire_bytes=1, across_bytes=0)
    ledger.record("c", "all_gather", "in-node", wire_bytes=2, across_bytes=0)
    ledger.record_baseline("c", "all_gather", wire_bytes=5, across_bytes=3)
    ledger.record_work(key, 3)
    between = ledger.since(before)
    assert [(key.unit, traffic) for key, traffic in between.rows()] == [
        ("b", Traffic(1, 1, 0)),
        ("c", Traffic(1, 2, 0)),
    ]
    assert between.baseline_total() == Traffic(1, 5, 3)
    assert list(between.work()) == [(key, CodecWork(1, 3))]
    assert before.total() == Traffic(2, 20, 8)  # a copy does not go on counting


def test_table_shows_hops_and_the_ratio() -> None:
    ledger = Ledger()
    ledger.record("a", "all_gather", "across", wire_bytes=1000, across_bytes=1000)
    ledger.record_baseline("a", "all_gather", wire_bytes=9000, across_bytes=3000)
    table = ledger.table()
    assert "across" in table
    assert "1,000" in table
    assert "3.00x" in table


def _one_step(config: zeropp.Config, micro_batches: int) -> Any:
    trainer = Trainer(config, micro_batches=micro_batches, accumulate_in_node=config.route == "two-hop")
    trainer.step()
    assert trainer.zpp is not None
    ledger = trainer.zpp.ledger
    ledger.reset()
    trainer.step()
    padded = sum(-(-p.shape[0] // 4) * 4 * p[0].numel() for p in trainer.net.blocks[0].parameters())
    total = {
        (kind, hop): ledger.total(unit="blocks.0", collective=kind, hop=hop).wire_bytes
        for kind in ("all_gather", "reduce_scatter")
        for hop in ("across", "in-node", "flat")
    }
    across = ledger.total(unit="blocks.0").across_bytes
    return padded, total, across, ledger.baseline_total(unit="blocks.0").across_bytes


def _row(bits: int) -> int:
    """Bytes of a row of the net's block on four ranks. Short parameters are sent as they are, neighbours
    together; the two matrices have blocks of 32, because those need the fewest bytes."""
    as_they_are = [12, 10, 5]  # gate, mix and norm; bias of up; bias of down
    blocks = [-(-200 // 32), -(-185 // 32)]  # 10 rows of up, 5 rows of down
    sizes = [4 * numel for numel in as_they_are] + [count * (32 * bits // 8 + 2) for count in blocks]
    return sum(-(-size // 16) * 16 for size in sizes)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_bytes_of_the_default_are_what_the_paper_says(ranks: Ranks, micro_batches: int) -> None:
    """Weights once at 8 bits, gradients once at 4, whatever the number of micro-batches."""
    for padded, total, across, _ in ranks.run(_one_step, zeropp.Config(node_size=2), micro_batches):
        assert padded // 4 == 12 + 10 + 5 + 200 + 185
        assert total["all_gather", "across"] == _row(8)
        assert total["all_gather", "in-node"] == 2 * micro_batches * 2 * _row(8)
        assert total["reduce_scatter", "in-node"] == micro_batches * 2 * _row(8)
        assert total["reduce_scatter", "across"] == _row(4)
        assert total["all_gather", "flat"] == total["reduce_scatter", "flat"] == 0
        assert across == _row(8) + _row(4)


def test_bytes_of_the_flat_16_bit_wire(ranks: Ranks) -> None:
    """Per node of 2 x 2: a ring carries 3/4 of the model out, in each of three collectives."""
    results = ranks.run(_one_step, zeropp.Config.wire16(node_size=2), 1)
    for padded, total, across, baseline in results:
        shard = padded // 4
        row = -(-shard * 2 // 16) * 16
        assert total["all_gather", "flat"] == 2 * 3 * row
        assert total["reduce_scatter", "flat"] == 3 * shard * 2
        assert across == 2 * 3 * row // 2 + 3 * shard * 2 // 2
        assert baseline == 3 * (3 * shard * 2 // 2)


def _work(config: zeropp.Config, micro_batches: int) -> Any:
    trainer = Trainer(config, micro_batches=micro_batches, accumulate_in_node=True)
    trainer.step()
    assert trainer.zpp is not None
    ledger = trainer.zpp.ledger
    ledger.reset()
    trainer.step()
    padded = sum(-(-p.shape[0] // 4) * 4 * p[0].numel() for p in trainer.net.blocks[0].parameters())
    counted = {key[1:]: work.elements for key, work in ledger.work() if key.unit == "blocks.0"}
    return padded, counted


def test_codec_work_of_the_default(ranks: Ranks) -> None:
    for padded, counted in ranks.run(_work, zeropp.Config(node_size=2), 1):
        assert counted == {
            ("all_gather", "across", "encode", "int8"): padded // 4,
            ("all_gather", "in-node", "decode", "int8"): 2 * padded,  # forward and backward
            ("reduce_scatter", "in-node", "encode", "int8"): padded,
            ("reduce_scatter", "in-node", "recode_from", "int8"): padded,
            ("reduce_scatter", "across", "recode_to", "int4"): padded // 2,
            ("reduce_scatter", "across", "decode_sum", "int4"): padded // 2,
        }


def test_codec_work_on_what_is_kept_stands_apart_from_that_of_hops(ranks: Ranks) -> None:
    for padded, counted in ranks.run(_work, zeropp.Config.four_bit(node_size=2), 3):
        assert counted == {
            ("all_gather", "node shard", "decode", "bf16"): padded // 4 + padded // 2 + 6 * padded // 2,
            ("all_gather", "across", "encode", "int4"): padded // 4,
            ("all_gather", "across", "decode_sum", "int4"): padded // 2,
            ("all_gather", "node shard", "encode", "bf16"): padded // 2,
            ("all_gather", "in-node", "encode", "int8"): 6 * padded // 2,  # twice per micro-batch
            ("all_gather", "in-node", "decode", "int8"): 6 * padded,
            ("reduce_scatter", "in-node", "encode", "int8"): 3 * padded,
            ("reduce_scatter", "in-node", "decode_sum", "int8"): 3 * padded,
            ("reduce_scatter", "kept errors", "decode_sum", "int8"): 2 * padded // 2,
            ("reduce_scatter", "across", "encode", "int4"): padded // 2,
            ("reduce_scatter", "kept errors", "decode_sum", "int4"): padded // 2,
            ("reduce_scatter", "kept errors", "encode", "int8"): padded // 2,
            ("reduce_scatter", "across", "decode_sum", "int4"): padded // 2,
        }


def _resharded_in_the_node() -> tuple[int, int]:
    trainer = Trainer(zeropp.Config(node_size=2), net=make_net(reshard_after_forward=2))
    trainer.step()
    assert trainer.zpp is not None
    traffic = trainer.zpp.ledger.total(unit="blocks.0", hop="post-forward")
    return traffic.wire_bytes, traffic.across_bytes


def test_a_gather_on_fewer_ranks_is_counted_where_it_runs(ranks: Ranks) -> None:
    for wire_bytes, across_bytes in ranks.run(_resharded_in_the_node):
        assert wire_bytes > 0
        assert across_bytes == 0


def test_off_sends_what_plain_fsdp2_sends(ranks: Ranks) -> None:
    for padded, total, _, _ in ranks.run(_one_step, zeropp.Config.off(node_size=2), 1):
        assert total["all_gather", "flat"] == 2 * 3 * padded  # 4 bytes times a quarter
        assert total["reduce_scatter", "flat"] == 3 * padded
