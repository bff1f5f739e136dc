from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zeropp.tools.cli import main


def zeropp(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zeropp", *arguments], capture_output=True, text=True, timeout=600
    )


def test_lab_run_shows_ranks_links_and_exit_codes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(250_000)\n"
        "dist.all_reduce(x)\n"
        "print('sum', x[0].item(), sys.argv[1:])\n"
        "dist.destroy_process_group()\n"
        "sys.exit(3 if dist.is_initialized() is False and sys.argv[1] == 'bad' else 0)\n"
    )
    logs = tmp_path / "logs"
    done = zeropp(
        "lab", "run", "--ranks-per-node", "1", "--link", "100mbit", "--at", "0s node1 link=50mbit",
        "--logs", str(logs), "--", str(script), "good", "--flag",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 1 | sum 2.0 ['good', '--flag']" in done.stdout
    assert "link of node 1: link=50mbit" in done.stdout
    assert "bytes per link" in done.stdout
    assert done.stdout.count("exit code 0") == 2
    (row,) = (line for line in done.stdout.splitlines() if "50mbit" in line and "│" in line)
    sent = int(row.split("│")[3].replace(",", ""))
    assert 1_000_000 < sent < 1_200_000  # a ring: each of two ranks sends all of its megabyte
    assert (logs / "rank-0.log").read_text() == "sum 2.0 ['good', '--flag']\n"


def test_the_exit_code_is_1_if_a_rank_fails(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    logs = tmp_path / "logs"
    script.write_text(
        "import shutil, sys\nprint('one', flush=True)\n"
        f"shutil.rmtree({str(logs)!r})\nprint('two')\nsys.exit(3)\n"
    )
    nodes = ("--nodes", "1", "--ranks-per-node", "1", "--logs", str(logs))
    done = zeropp("lab", "run", *nodes, "--", str(script))
    assert done.returncode == 1
    assert "exit code 3" in done.stdout
    assert (
        "no more logs: No such file or directory" in done.stdout
    )  # printed once; the job continues without logs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script is given"),
        (["--link", "fast", "--", "train.py"], "link is 'fast'; expected a rate"),
        (["--at", "now", "--", "train.py"], "change of a link is 'now'"),
    ],
)
def test_bad_input_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "run", *arguments]) != 0
    assert message in capsys.readouterr().err
