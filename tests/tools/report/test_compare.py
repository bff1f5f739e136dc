"""Comparison of training runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from zeropp import Config
from zeropp.tools.report.compare import (
    COLUMNS,
    compare_lines,
    differences,
    loss_curves,
    read_runs,
    result_sentence,
)
from zeropp.tools.report.compare_page import render_compare
from zeropp.tools.train.metrics import MetricsFile
from zeropp.tools.train.run_events import Evaluation, RunInfo, StepRecord, Summary

PARAMETERS, NODES = 1_000_000, 2
NO_PRESET = Config(block_size=256)


def write_run(
    folder: Path,
    bytes_per_parameter: float,
    validation_loss: float,
    config: Config | str = NO_PRESET,
    ranks: int = 4,
    nodes: int = NODES,
) -> Path:
    """Write a run of twenty steps, from loss 5 to 2."""
    folder.mkdir()
    file = MetricsFile(folder)
    sends = config if isinstance(config, str) else asdict(config)
    file.on_start(RunInfo({"zeropp": sends}, PARAMETERS, ranks, nodes, "cpu", {"torch": "0"}, 1))
    across = round(bytes_per_parameter * PARAMETERS * NODES)
    for step in range(1, 21):
        loss = 5.0 - 3.0 * (step - 1) / 19
        file.on_step(StepRecord(step, loss, 1.0, 1e-3, 0.5, 1000, 2 * across, across, None))
    file.on_evaluation(Evaluation(20, validation_loss))
    file.on_end(Summary(20, True, 300 * 2**20, 3 * 2**20, "checkpoint"))
    return folder


def test_every_run_is_compared_to_the_first(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "plain", 16.0, 2.0), write_run(tmp_path / "ours", 0.8, 1.98)])
    header, plain, ours = compare_lines(runs)
    assert header == list(COLUMNS)
    assert dict(zip(COLUMNS, ours, strict=True)) == {
        "": "ours", "steps": "20", "loss": "2.7105", "validation loss": "1.9800", "vs first": "-1.00%",
        "bytes across nodes": "800,000", "per parameter": "0.80", "less by": "20.0x", "tokens/s": "2,000",
        "peak MiB": "300", "zeropp keeps MiB": "3.0",
    }  # fmt: skip
    assert (plain[4], plain[7]) == ("-", "-")


def test_other_differences_than_the_config_are_named(tmp_path: Path) -> None:
    first, same = (write_run(tmp_path / name, 16.0, 2.0) for name in ("first", "same"))
    other = write_run(tmp_path / "other", 16.0, 2.0, ranks=2, nodes=1)
    assert differences(read_runs([first, same])) == []
    runs = read_runs([first, other])
    assert differences(runs) == [
        "the runs differ in ranks: first 4, other 2",
        "the runs differ in nodes: first 2, other 1",
    ]
    page = render_compare(runs)
    assert "the runs differ in ranks: first 4, other 2" in page
    assert "2 ranks on 1 node," in page


def test_runs_with_equal_names_are_told_apart(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        write_run(tmp_path / parent / "run", 1.0, 2.0)
    assert len(read_runs([tmp_path / "a" / "run", tmp_path / "b" / "run"])) == 2


def test_loss_curves_are_means_between_their_points(tmp_path: Path) -> None:
    table = loss_curves(read_runs([write_run(tmp_path / "run", 1.0, 2.0)]), points=4)
    assert list(table.columns[0].cells) == ["5", "10", "15", "20"]
    assert next(iter(table.columns[1].cells)) == "4.6842"


def test_the_result_is_one_sentence_with_three_numbers(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "plain", 16.0, 2.02), write_run(tmp_path / "ours", 0.8, 2.0123)]
    plain, ours = read_runs(folders).values()
    learned_and_sent = "zeropp: validation loss 2.01 (plain FSDP2 2.02), 20.0x fewer bytes between nodes"
    speed = "1.0x the tokens per second"
    assert result_sentence(plain, ours, has_network=True) == f"{learned_and_sent}, {speed}."
    assert result_sentence(plain, ours, has_network=False) == (
        f"{learned_and_sent}. There is no network to measure here: on local ranks, {speed}."
    )
