"""Training across nodes, for real: what crosses the links, and what bad links do."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from zeropp.lab import Cluster, JobResult
from zeropp.lab.job import OnLine

Results = list[dict[str, dict[str, Any]]]
ROOT = Path(__file__).parents[2]
NAMES = ("default", "four_bit", "wire16", "lora-fp32", "lora-bf16")
HEADER_BYTES = 14 + 20 + 32
"""Ethernet, IP, and TCP with time stamps."""


def train(
    cluster: Cluster,
    folder: Path,
    *arguments: str,
    timeout_seconds: float = 600.0,  # however slow the machine is
    on_line: OnLine | None = None,
) -> tuple[JobResult, Results]:
    """Run steps.py; its results by rank, if it succeeded."""
    folder.mkdir(exist_ok=True)
    result = cluster.run(
        ["-m", "tests.lab.steps", str(folder), *arguments],
        timeout_seconds=timeout_seconds,
        environment={"PYTHONPATH": str(ROOT)},
        on_line=on_line,
    )
    if not result.succeeded:
        return result, []
    return result, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(cluster.world_size)]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All configs on links without faults."""
    with Cluster(nodes=2, ranks_per_node=2, link="1gbit") as cluster:
        result, results = train(cluster, tmp_path_factory.mktemp("good"), *NAMES)
    result.check()
    return results


@pytest.mark.parametrize("config", NAMES)
def test_counters_and_ledger_agree_within_five_percent(good: Results, config: str) -> None:
    """Without the headers of packets: how many there are depends on how busy the machine is."""
    for node in (0, 1):
        ranks = [good[rank][config] for rank in (2 * node, 2 * node + 1)]
        counted = ranks[0]["counter_bytes"] - HEADER_BYTES * ranks[0]["packets"]
        said = sum(rank["ledger_bytes"] for rank in ranks)
        assert said <= counted <= 1.05 * said


def test_bytes_per_node_and_parameter(good: Results) -> None:
    per_parameter = {
        config: run["counter_bytes"] / run["parameters"] / (len(run["losses"]) - 1)
        for config, run in good[0].items()
    }
    assert per_parameter["default"] < 0.80
    assert per_parameter["four_bit"] < 0.55
    assert 4.5 < per_parameter["wire16"] < 4.65  # three rings of 3/4 of the model in 16 bits, and headers
    assert per_parameter["lora-fp32"] < 1.0  # for each parameter that is trained
    assert per_parameter["lora-bf16"] < 1.0


def test_loss_and_delay_change_no_bit(good: Results, tmp_path: Path) -> None:
    with Cluster(nodes=2, ranks_per_node=2, link="1gbit", delay="20ms", loss="1%") as cluster:
        result, results = train(cluster, tmp_path, "default")
    result.check()
    assert [rank["default"]["losses"] for rank in results] == [rank["default"]["losses"] for rank in good]
    assert max(results[0]["default"]["seconds"]) > 0.1  # it was slow, as it should be


def test_a_link_that_is_down_for_two_seconds_holds_training_up_and_changes_nothing(
    good: Results, tmp_path: Path
) -> None:
    cut = threading.Event()
    with Cluster(nodes=2, ranks_per_node=2, link="1gbit") as cluster:

        def cut_the_link(who: str, line: str) -> None:
            if line == "step 2" and not cut.is_set():
                cut.set()
                cluster.link_down(1)
                threading.Timer(2.0, cluster.link_up, [1]).start()

        result, results = train(cluster, tmp_path, "default", "--steps", "40", on_line=cut_the_link)
    result.check()
    run = results[0]["default"]
    assert max(run["seconds"]) > 1.0
    assert run["losses"][: len(good[0]["default"]["losses"])] == good[0]["default"]["losses"]


def test_a_link_that_stays_down_is_a_clear_error_within_the_timeout(tmp_path: Path) -> None:
    cut = threading.Event()
    with Cluster(nodes=2, ranks_per_node=2, link="1gbit") as cluster:

        def cut_the_link(who: str, line: str) -> None:
            if line == "step 2" and not cut.is_set():
                cut.set()
                cluster.link_down(1)

        result, _ = train(
            cluster, tmp_path, "default", "--steps", "2000", "--timeout", "5", on_line=cut_the_link
        )
    assert not result.succeeded
    assert all(code != 0 for code in result.exit_codes.values())
    words = "\n".join(line for lines in result.last_lines.values() for line in lines)
    assert "Timed out waiting 5000ms" in words
