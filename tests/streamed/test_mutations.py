"""Does the device with streams notice what it is there for? Copies of zeropp, each with one fault, on it.

A mutation that no longer fits the sources fails: say what the fault looks like now.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import zeropp
from tests.ranks import Ranks
from tests.streamed import device
from tests.streamed.jobs import Outcome, gather_beside, gather_on_two_streams, train

DEFAULT = asdict(zeropp.Config(node_size=2))


def train_one_step(name: str, folder: str) -> Outcome:
    return train(device.NAME, DEFAULT, steps=1, name=name, folder=folder)


@dataclass(frozen=True)
class Mutation:
    file: str
    old: str
    new: str
    run: Callable[..., Outcome]
    expected: str
    """In what the device reports on every rank."""


MUTATIONS = {
    "no wait for a collective": Mutation(
        "comm/wire.py",
        "work.wait()",
        "pass",
        train_one_step,
        "not ordered after: all_to_all writes",
    ),
    "a node shard in use on another stream": Mutation(
        "comm/node_shard.py",
        "torch.accelerator.current_stream().wait_event(self._last_use)",
        "pass",
        gather_on_two_streams,
        "not ordered after",
    ),
    "a buffer freed before its message has left": Mutation(
        "comm/wire.py",
        "work.wait()",
        "works = []",
        train_one_step,
        "in memory that was freed since, all_to_all",
    ),
    "scratch of another stream": Mutation(
        "comm/wire.py",
        "            return torch.empty(shape, dtype=dtype, device=device)",
        "            with self.__dict__.setdefault('side', torch.Stream(device)):\n"
        "                return torch.empty(shape, dtype=dtype, device=device)",
        train_one_step,
        "in memory that was freed since",
    ),
    "no wait for a gather beside the current stream": Mutation(
        "comm/side_stream.py",
        "torch.accelerator.current_stream().wait_event(self._done)",
        "pass",
        gather_beside,
        "not ordered after",
    ),
    "a gather beside the current stream that does not wait for its input": Mutation(
        "comm/side_stream.py",
        "side.wait_stream(torch.accelerator.current_stream())",
        "pass",
        gather_beside,
        "not ordered after",
    ),
    "a host synchronization": Mutation(
        "comm/wire.py",
        "work.wait()",
        "work.wait(); torch.accelerator.synchronize()",
        train_one_step,
        "synchronization: device",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_noticed(streamed_ranks: Ranks, tmp_path: Path, name: str) -> None:
    mutation = MUTATIONS[name]
    package = "mutant_" + name.replace(" ", "_")
    copy = tmp_path / package
    shutil.copytree(Path(zeropp.__file__).parent, copy)  # with what is compiled already
    source = (copy / mutation.file).read_text()
    assert mutation.old in source
    (copy / mutation.file).write_text(source.replace(mutation.old, mutation.new))
    outcomes: list[Any] = streamed_ranks.run(mutation.run, package, str(tmp_path))
    for outcome in outcomes:
        reports = [*outcome.conflicts, *outcome.synchronizations]
        assert any(mutation.expected in report for report in reports), reports[:20]
