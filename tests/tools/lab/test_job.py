"""Jobs: output and exit code of every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeropp.tools.lab import Cluster, JobError
from zeropp.tools.lab.job import JobResult

# No torch: torchrun is what takes the time.
PROGRAM = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
print("out", rank, os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["WORLD_SIZE"])
print("err", rank, file=sys.stderr)
if len(sys.argv) > 1 and rank == 1:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    sys.exit(7)
if len(sys.argv) > 1 and rank == 0:
    open(sys.argv[1], "w").close()
    time.sleep(600)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_the_caller_gets_the_output_of_every_rank(program: str, tmp_path: Path) -> None:
    seen: set[tuple[str, str]] = set()
    with Cluster(nodes=2, ranks_per_node=1) as cluster:
        result = cluster.run(
            [program],
            timeout_seconds=300,
            on_line=lambda source, line: seen.add((source, line)),
            log_folder=tmp_path / "logs",
        )
    assert result.check().exit_codes == {0: 0, 1: 0}
    assert seen == {
        ("rank 0", "out 0 0 1 2"),
        ("rank 0", "err 0"),
        ("rank 1", "out 1 0 1 2"),
        ("rank 1", "err 1"),
    }
    assert set((tmp_path / "logs/rank-1.log").read_text().splitlines()) == {"out 1 0 1 2", "err 1"}


def test_a_failed_rank_stops_its_node_and_the_result_has_its_code(program: str, tmp_path: Path) -> None:
    """Rank 1 fails after rank 0 has created a file."""
    with Cluster(nodes=1, ranks_per_node=2) as cluster:
        result = cluster.run([program, str(tmp_path / "has_started")], timeout_seconds=300)
    assert result.exit_codes == {0: -15, 1: 7}
    with pytest.raises(
        JobError,
        match=r"(?s)rank 0 was ended by SIGTERM.*, rank 1 ended with exit code 7.*--- rank 1\n.*err 1",
    ):
        result.check()


def test_the_error_of_a_rank_has_its_signal_and_its_stack(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    with Cluster(nodes=1, ranks_per_node=1) as cluster:
        result = cluster.run([str(program)], timeout_seconds=300)
    message = r"rank 0 was ended by SIGILL \(illegal instruction\).*Fatal Python error: Illegal instruction"
    with pytest.raises(JobError, match=rf"(?s){message}.*line 2 in.*Try: set ONEDNN_MAX_CPU_ISA"):
        result.check()


def test_a_job_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    endless = tmp_path / "endless.py"
    endless.write_text("import time\ntime.sleep(600)\n")
    with (
        Cluster(nodes=1, ranks_per_node=1) as cluster,
        pytest.raises(JobError, match="not done after 3 seconds"),
    ):
        cluster.run([str(endless)], timeout_seconds=3)


def test_success_is_every_rank_at_zero() -> None:
    assert JobResult({0: 0, 1: 0}, 1.0, {}).succeeded
    assert not JobResult({0: 0, 1: None}, 1.0, {}).succeeded
