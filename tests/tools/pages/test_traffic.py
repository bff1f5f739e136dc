"""The page of `ZeroPP.report`."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

import zeropp
from tests.ranks import Ranks
from tests.training import Trainer
from zeropp.comm.ledger import Ledger
from zeropp.tools.pages.traffic import carried, headline, render_traffic, sent_lines, total_lines
from zeropp.topology import Topology


def sample_ledger() -> Ledger:
    """Return a ledger of two units with weights and gradients on both hops."""
    ledger = Ledger()
    for unit in ("(root)", "blocks.0"):
        for collective, across in (("all_gather", 50_000), ("reduce_scatter", 25_000)):
            ledger.record(unit, collective, "across", wire_bytes=across, across_bytes=across)  # type: ignore[arg-type]
            ledger.record(unit, collective, "in-node", wire_bytes=100_000, across_bytes=0)  # type: ignore[arg-type]
            ledger.record_baseline(unit, collective, wire_bytes=600_000, across_bytes=300_000)  # type: ignore[arg-type]
    return ledger


def sample_page() -> str:
    layout = Topology(ranks=(0, 1, 2, 3), node_of=(0, 0, 1, 1), rank=0)
    return render_traffic(sample_ledger(), [None, layout], [{"unit": "(root)", "weights": "int8 across"}], 0)


def test_the_result_in_words() -> None:
    assert headline(Ledger()) == "Nothing was sent yet"
    assert headline(sample_ledger()).startswith(
        "8x fewer bytes across nodes than FSDP2 with a 16-bit wire: 150 kB"
    )
    one_node = Ledger()
    one_node.record("a", "all_gather", "in-node", wire_bytes=100, across_bytes=0)
    assert headline(one_node) == "100 bytes, none of them across nodes"
    more = Ledger()
    more.record("a", "all_gather", "flat", wire_bytes=100, across_bytes=100)
    more.record_baseline("a", "all_gather", wire_bytes=50, across_bytes=50)
    assert headline(more).startswith("2x more bytes across nodes")


def test_links_carry_the_bytes_of_the_ledger() -> None:
    assert carried(sample_ledger(), across=True) == ("weights 100 kB, gradients 50 kB", 150_000)
    assert carried(sample_ledger(), across=False) == ("weights 200 kB, gradients 200 kB", 400_000)
    assert total_lines(sample_ledger())[-1] == ["all", "150,000", "1,200,000", "8.00x"]


def test_a_model_without_compressed_units_has_a_page() -> None:
    html = render_traffic(Ledger(), [None], [{"unit": "(root)", "notes": "left alone: why"}], 3)
    assert "Nothing was sent yet" in html
    assert "left alone: why" in html


def _report(folder: str) -> tuple[str, list[list[str]], int]:
    trainer = Trainer(zeropp.Config(node_size=2))
    assert trainer.zpp is not None
    trainer.step()
    path = f"{folder}/{dist.get_rank()}.html"
    trainer.zpp.report(path)
    ledger = trainer.zpp.ledger
    return Path(path).read_text(), sent_lines(ledger), ledger.total().across_bytes


def test_every_rank_writes_what_it_sent(ranks: Ranks, tmp_path: Path) -> None:
    for rank, (html, lines, across) in enumerate(ranks.run(_report, str(tmp_path), world=4)):
        assert f"zeropp report, rank {rank} of 4, 2 nodes x 2 ranks" in html
        assert across > 0
        for line in lines[1:]:
            assert "".join(f"<td>{text}</td>" for text in line) in html
        assert "int8 across -&gt; int8 in-node" in html
