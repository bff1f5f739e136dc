"""`zeropp train`, from the command line to its files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.train.runs import command_line, small_run
from zeropp import Config
from zeropp.tools.cli import main
from zeropp.tools.cli.train import parse
from zeropp.tools.train.checkpoint import steps_in
from zeropp.tools.train.demo import steps_done
from zeropp.tools.train.metrics import FILE_NAME, Metrics


def test_options_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'steps = 7\n[zeropp]\npreset = "fsdp2"\nnode_size = 2\n[optimizer]\nlearning_rate = 0.5\n'
    )
    run = parse(["--config", str(path), "--optimizer.learning-rate", "1e-3", "--batch.size", "3"])
    assert (run.steps, run.optimizer.learning_rate, run.batch.size) == (7, 1e-3, 3)
    assert run.zeropp == Config.off(node_size=2)
    run = parse(["--config", str(path), "--preset", "paper", "--zeropp.block-size", "256"])
    assert run.zeropp == Config.paper(node_size=2, block_size=256)


def test_auto_accepts_no_options_of_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--preset", "auto", "--batch.size", "3"]).zeropp == "auto"
    path = tmp_path / "run.toml"
    path.write_text('[zeropp]\npreset = "auto"\n')
    assert parse(["--config", str(path)]).zeropp == "auto"
    assert main(["train", "--preset", "auto", "--zeropp.block-size", "256"]) == 1
    assert "options --zeropp.* are given with preset 'auto'" in capsys.readouterr().err


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--config", "--preset", "--optimizer.learning-rate", "--zeropp.weights", "--resume"):
        assert option in shown
    assert "torchrun --nnodes" in shown


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", "nowhere.toml"]) == 1
    assert "nowhere.toml cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch.size", "0"], "batch.size is 0; expected a positive number"),
        (["--zeropp.block-size", "3"], "block_size is 3; expected a power of two"),
        (["--optimizer.learning-rat", "1"], "--optimizer.learning-rat"),
    ],
)
def test_bad_options_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def zeropp_train(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "zeropp", "train", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def test_a_run_that_diverges_keeps_its_last_good_checkpoint(tmp_path: Path) -> None:
    """One rank, without torchrun. The first step makes the weights huge; the second loss is NaN."""
    run = small_run(tmp_path, zeropp=Config(node_size=1))
    arguments = [*command_line(run), "--checkpoint.every", "1", "--schedule.warmup-steps", "0"]
    done = zeropp_train(*arguments, "--optimizer.learning-rate", "1e30", "--logging.tensorboard")
    assert done.returncode == 1, done.stderr
    assert "of step 2 is nan: the run has diverged" in done.stderr
    assert "Traceback" not in done.stderr
    assert steps_in(tmp_path / "checkpoints") == [1]
    assert not list((tmp_path / "checkpoints").glob("*.partial"))
    assert [record.step for record in Metrics(tmp_path / FILE_NAME).steps] == [1]
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_a_run_that_a_signal_stops_is_saved_and_exits_with_130(tmp_path: Path) -> None:
    """One rank, without torchrun, and SIGINT, as Ctrl-C on a terminal sends."""
    run = replace(small_run(tmp_path), steps=100_000)

    def interrupt() -> None:
        while not steps_done(tmp_path):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    watch = threading.Thread(target=interrupt, daemon=True)
    watch.start()
    assert main(["train", *command_line(run), "--zeropp.node-size", "1"]) == 130
    watch.join()
    end = Metrics(tmp_path / FILE_NAME).end
    assert end is not None
    assert not end.is_complete
    assert steps_in(tmp_path / "checkpoints")[-1:] == [end.step]


def test_a_missing_folder_is_created(tmp_path: Path) -> None:
    run = replace(small_run(tmp_path / "data"), folder=tmp_path / "a" / "b", steps=1)
    assert main(["train", *command_line(run)]) == 0
    assert (tmp_path / "a" / "b" / "checkpoints" / "step-00000001").is_dir()
