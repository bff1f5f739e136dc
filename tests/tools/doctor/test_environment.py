from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest

from tests.ranks import Ranks
from tests.tools.doctor.check_job import run
from tests.tools.test_amx import DIES_UNCAPPED
from zeropp.tools import amx
from zeropp.tools.amx import CAP_VARIABLE, make_bf16_safe
from zeropp.tools.doctor import environment
from zeropp.tools.doctor.check import Check, CheckResult, DoctorSettings
from zeropp.tools.doctor.environment import (
    Bf16Trial,
    Device,
    RankLocation,
    _judge_bf16,
    _judge_devices,
    _judge_environment,
    _judge_locations,
)


def checks(settings: DoctorSettings) -> Iterator[Check]:
    return environment.checks()


def test_four_ranks_on_one_machine(ranks: Ranks) -> None:
    found, *_ = run(ranks, checks, env={"NCCL_SOCKET_IFNAME": "eth7"})
    assert {name: result.state for name, result in found.items()} == {
        "versions": "ok", "devices": "ok", "bf16 products": "ok", "nodes": "warning", "environment": "ok"
    }  # fmt: skip
    assert "backend gloo" in found["versions"].saw
    assert "node 0: ranks 0, 1; node 1: ranks 2, 3, by --node-size 2" in found["nodes"].saw
    assert "GLOO_SOCKET_IFNAME=lo" in found["environment"].saw
    assert "NCCL_SOCKET_IFNAME=eth7" in found["environment"].saw


def dying() -> AbstractContextManager[object]:
    """A CPU that announces AMX, on which trials end with SIGILL unless oneDNN is capped."""
    stack = ExitStack()
    stack.enter_context(patch.dict(os.environ))
    os.environ.pop(CAP_VARIABLE)
    folder = stack.enter_context(TemporaryDirectory())
    trial = partial(make_bf16_safe, (sys.executable, "-c", DIES_UNCAPPED), Path(folder))
    stack.enter_context(patch.object(amx, "announces_amx", lambda: True))
    stack.enter_context(patch.object(environment, "make_bf16_safe", trial))
    return stack


def test_bf16_products_that_end_the_process_are_a_fault(ranks: Ranks) -> None:
    found, *_ = run(ranks, checks, dying, (1,), names=("bf16 products", "environment"))
    trial = found["bf16 products"]
    assert trial.state == "fault"
    assert "rank 1: a product in bf16 ends the process (SIGILL): the CPU announces AMX" in trial.saw
    assert trial.advice == "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the job's environment"
    assert "environment" in found  # the later checks run
    elsewhere = _judge_bf16([Bf16Trial(False, True, "why")])  # ranks train on another device
    assert elsewhere.state == "warning"
    assert _judge_bf16([Bf16Trial(True, True, "")]).saw == "AMX is announced, and a product in bf16 works"


def elsewhere() -> AbstractContextManager[object]:
    return patch.object(environment, "_machine", lambda: "another machine")


def test_a_rank_on_the_wrong_node_is_named(ranks: Ranks) -> None:
    """The ranks alternate between two machines, and node_size is wrong."""
    found, *_ = run(ranks, checks, elsewhere, (1, 3), names=("nodes",))
    assert found["nodes"].state == "fault"
    assert "node 0 is ranks 0, 1, by --node-size 2; rank 1: another machine" in found["nodes"].saw
    assert "node_size" in found["nodes"].advice


def test_a_node_size_that_does_not_divide_is_a_fault(ranks: Ranks) -> None:
    found, *_ = run(ranks, checks, node_size=3, names=("nodes",))
    assert found["nodes"].state == "fault"
    assert "Config.node_size is 3, which does not divide the 4 ranks" in found["nodes"].saw


def at(machine: str, network: str = "", node_of: tuple[int, ...] = (0, 0, 1, 1)) -> RankLocation:
    return RankLocation(machine, network, "host names", node_of)


def test_nodes_and_machines() -> None:
    two = _judge_locations([at("a"), at("a"), at("b"), at("b")])
    assert two == CheckResult("ok", "node 0: ranks 0, 1; node 1: ranks 2, 3, by host names")
    lab = _judge_locations([at("a", "net 0")] * 2 + [at("a", "net 1")] * 2)
    assert lab.state == "ok"
    assert _judge_locations([at("a")] * 4).state == "warning"
    odd = (0, 0, 0, 1)
    assert _judge_locations([at("a", node_of=odd)] * 3 + [at("b", node_of=odd)]).state == "fault"
    disagreeing = _judge_locations([at("a"), at("a"), at("b"), at("b", node_of=(0, 1, 0, 1))])
    assert disagreeing.saw == "rank 3 detected the nodes (0, 1, 0, 1), rank 0 (0, 0, 1, 1)"
    assert _judge_locations([at("a", node_of=(0, 0))] * 2).saw.endswith("no traffic crosses nodes")


def test_devices() -> None:
    one, other = Device("A100, 80 GiB", "550", "a 0"), Device("A100, 80 GiB", "550", "a 1")
    assert _judge_devices([one, other]) == CheckResult("ok", "A100, 80 GiB 550")
    assert _judge_devices([one, other, one]).saw == "ranks 0, 2 share a device"
    slow = _judge_devices([one, Device("V100, 32 GiB", "550", "a 1")])
    assert slow.state == "warning"
    assert slow.saw == "A100, 80 GiB 550 on rank 0, V100, 32 GiB 550 on rank 1"


@pytest.mark.parametrize(
    ("everyone", "state", "message"),
    [
        ([{}, {}], "ok", "no relevant variable"),
        ([{"CUDA_LAUNCH_BLOCKING": "1"}] * 2, "warning", "nothing overlaps"),
        ([{"CUDA_LAUNCH_BLOCKING": "0"}] * 2, "ok", "CUDA_LAUNCH_BLOCKING=0"),
        ([{"NCCL_SOCKET_IFNAME": "a"}, {}], "warning", "NCCL_SOCKET_IFNAME: a on rank 0, not set on rank 1"),
    ],
)
def test_environment(everyone: list[dict[str, str]], state: str, message: str) -> None:
    found = _judge_environment(everyone)
    assert found.state == state
    assert message in found.saw


@pytest.mark.parametrize(
    ("changes", "state", "message"),
    [
        ({"torch": "2.99.0"}, "warning", "tested with torch 2.13"),
        ({"numba": "none"}, "warning", "plain torch"),
        ({}, "ok", "torch 2.13.0, numba 0.68"),
    ],
)
def test_versions(changes: dict[str, str], state: str, message: str) -> None:
    known = {"torch": "2.13.0", "numba": "0.68"}
    found = environment._judge_versions([known | changes] * 2)
    assert found.state == state
    assert message in found.saw
    if changes:
        mixed = environment._judge_versions([known, known | changes])
        assert mixed.state == "fault"
        assert "on rank 1" in mixed.saw
