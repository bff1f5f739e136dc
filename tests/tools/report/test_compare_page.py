from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.report.test_compare import write_run
from zeropp import Config
from zeropp.tools.pages import STRATEGY_COLORS
from zeropp.tools.report.compare import read_runs
from zeropp.tools.report.compare_page import COMPILER, headline, render_compare, strategy_of


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    page = render_compare(read_runs([write_run(tmp_path / "a<b", 1.0, 2.0)]))
    assert "src=" not in page
    assert "a&lt;b" in page
    assert "<h1>a&lt;b: loss 2.0000 after 20 steps</h1>" in page
    assert page.count("<figure>") == 3
    assert len(page) < 60_000


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (Config(node_size=2), "default"),
        (Config.off(), "fsdp2"),
        (Config.four_bit(), "four-bit"),
        (Config.paper(node_size=4), "paper"),
        (Config(block_size=256), None),
        ("auto", "auto"),
    ],
)
def test_a_run_has_the_color_of_its_strategy(tmp_path: Path, config: Config | str, name: str | None) -> None:
    runs = read_runs([write_run(tmp_path / "run", 1.0, 2.0, config)])
    assert strategy_of(runs["run"]) == name
    if name is not None:
        assert f'fill="{STRATEGY_COLORS[name]}"' in render_compare(runs)


def test_the_result_in_words(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "plain", 16.0, 2.0, Config.off()),
        write_run(tmp_path / "better", 0.8, 1.9),
        write_run(tmp_path / "larger", 32.0, 2.001),
    ]
    assert headline(read_runs(folders[:2])) == "better: 20x fewer bytes across nodes than plain, loss -5.00%"
    runs = read_runs([folders[0], folders[2]])
    assert headline(runs) == "larger: 2x more bytes across nodes than plain, same loss (+0.05%)"


def test_the_compilers_memory_is_explained(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain", 16.0, 2.0, Config.off())
    ours = write_run(tmp_path / "ours", 0.8, 2.0, Config())
    assert COMPILER in render_compare(read_runs([plain, ours]))
    assert "compiler" not in render_compare(read_runs([plain]))
