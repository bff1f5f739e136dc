"""Invalid input of every command: one paragraph that names it, on one rank, and an exit code other than 0."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import Ranks
from tests.tools.report.test_compare import write_run
from tests.tools.train.runs import command_line, small_run, train_here
from zeropp.tools.cli import main
from zeropp.tools.cli.errors import print_error

BROKEN = "def build():\n    raise KeyError('size')\n"
"""Source code of a user's module."""
FAILS_LATER = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8)])
    def forward(self, tokens):
        return self.layers[0](tokens.nothing)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files with wrong contents."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "file").write_text("text")
    (folder / "bytes").write_bytes(b"\xff\xfe\x00" * 50)
    (folder / "empty").mkdir()
    for name in ("bytes.json", "bytes.toml", "bytes.npy"):
        (folder / name).write_bytes(b"\xff\xfe\x00" * 50)
    (folder / "folder.json").mkdir()
    (folder / "list.json").write_text("[1]")
    (folder / "other.json").write_text('{"a": 1}')
    (folder / "empty.npy").touch()
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "state.json").write_text('{"format": 1}')
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{")
    write_run(folder / "run", 16.0, 2.0)
    (folder / "users_broken.py").write_text(BROKEN)
    (folder / "users_syntax.py").write_text("def build(:\n")
    (folder / "users_later.py").write_text(FAILS_LATER)
    return folder


@pytest.fixture(autouse=True)
def no_world_is_left() -> Iterator[None]:
    """Destroy the process group of a failed command, which would live until the process ends."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


TRAIN = "train --folder {}/new --steps 1 --model.layers 1 --model.width 32 --model.heads 2"
PLAN = "plan --model tiny --ranks-per-node 2 --sequence 32"
CASES = [
    ("compare {}/run --html {}/empty", "empty cannot be written: it is a folder"),
    ("compare {}/run --html {}/file/c.html", "file is not a folder"),
    ("compare {}/run --html /proc/c.html", "/proc/c.html cannot be written: No such file or directory"),
    ("compare {}/bytes --html {}/c.html", "bytes cannot be read"),
    ("compare {}/empty --html {}/c.html", "metrics.jsonl cannot be read (No such file or directory)"),
    ("train --folder {}/file", "file is not a writable folder: a file has this name"),
    ("train --folder /proc/run", "/proc/run is not a writable folder"),
    ("train --config {}/empty", "empty cannot be read (Is a directory); expected a TOML file"),
    ("train --config {}/bytes.toml", "bytes.toml is not TOML"),
    ("train --preset nothing", "zeropp.preset is 'nothing'; expected one of default, four-bit, paper"),
    (TRAIN + " --data.source hf:{}/empty", "empty' cannot be read"),
    (TRAIN + " --data.source hf:{}/nowhere", "nowhere' cannot be read"),
    (TRAIN + " --data.source {}/nowhere", "nowhere' does not exist"),
    (TRAIN + " --data.source {}/empty.npy", "empty.npy cannot be read"),
    (TRAIN + " --data.source {}/bytes.npy", "bytes.npy cannot be read"),
    (TRAIN + " --data.source {}/file", "has 3 tokens for training and 1 for validation"),
    (TRAIN + " --resume {}/nowhere", "nowhere'; expected 'auto', 'never' or the folder of a checkpoint"),
    (TRAIN + " --resume {}/empty", "empty is not a checkpoint of zeropp train: state.json"),
    ("train --folder {}/new --model.source hf:{}/nowhere", "nowhere': expected a config.json"),
    ("train --folder {}/new --model.source hf:{}/hf", "hf' cannot be loaded"),
    ("train --folder {}/new --model.source hf:{}/bytes", "bytes' cannot be loaded"),
    ("export {}/nowhere {}/new", "nowhere has no checkpoint"),
    ("export {}/empty {}/new", "empty has no checkpoint"),
    ("export {}/checkpoint {}/file", "file is not a writable folder: a file has this name"),
    ("export {}/checkpoint {}/hf", "hf is not empty; expected a new or an empty folder"),
    ("export {}/checkpoint {}/exported", "checkpoint cannot be read: state.json has no 'run'"),
    ("demo --folder {}/file", "file is not a writable folder"),
    ("demo --folder {}/new --link fast", "link is 'fast'; expected a rate"),
    ("demo --folder {}/new --steps -1", "steps is -1; expected a positive number"),
    (PLAN + " --html {}/empty", "empty cannot be written: it is a folder"),
    (PLAN + " --json {}/empty", "empty cannot be written: it is a folder"),
    (PLAN + " --trace /proc/trace.json", "/proc/trace.json cannot be written"),
    (PLAN + " --hardware {}/list.json", "list.json is not a hardware file"),
    (PLAN + " --hardware {}/bytes.json", "bytes.json is not a hardware file"),
    (PLAN + " --hardware {}/folder.json", "folder.json', and there is no such file"),
    (
        PLAN + " --model users_broken:build",
        "users_broken:build', and it raised KeyError: 'size' ({}/users_broken.py, line 2)",
    ),
    (PLAN + " --model users_syntax:build", "users_syntax:build', and it raised SyntaxError"),
    (PLAN + " --model users_later:Model", "users_later:Model', and it raised AttributeError"),
    (PLAN + " --model hf:{}/hf", "is not a valid JSON file"),
    ("plan --ranks-per-node 0", "ranks_per_node is 0; expected a positive number"),
    ("lab run --logs {}/file -- train.py", "file is not a writable folder: a file has this name"),
    ("lab run --nodes 0 -- train.py", "nodes is 0"),
    ("lab bench --nodes 1", "nodes is 1; expected two or more"),
    ("lab bench --show {}/nowhere.json --html {}/b.html", "nowhere.json cannot be read"),
    (
        "lab bench --show {}/other.json --html {}/b.html",
        "other.json is not a JSON file from",
    ),
    (
        "lab bench --show {}/list.json --html {}/b.html",
        "list.json is not a JSON file from",
    ),
    ("lab bench --show {}/bytes --html {}/b.html", "bytes is not a JSON file from"),
    ("lab bench --json {}/empty", "empty cannot be written: it is a folder"),
    ("lab bench --html {}/empty", "empty cannot be written: it is a folder"),
]


@pytest.mark.parametrize(("line", "message"), CASES, ids=[line for line, _ in CASES])
def test_bad_input_is_one_paragraph(
    line: str,
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    try:
        code = main([word.replace("{}", str(folder)) for word in line.split()])
    except SystemExit as end:  # tyro's
        code = int(end.code or 0)
    output = capsys.readouterr().err
    assert code != 0
    assert message.replace("{}", str(folder)) in output
    assert "Traceback" not in output
    assert len([line for line in output.splitlines() if line.startswith("error: ")]) == 1
    assert {path: path.read_bytes() for path in before} == before


@pytest.fixture(scope="module")
def run_folder(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, after steps 4 and 8."""
    run = small_run(tmp_path_factory.mktemp("run"))
    ranks.run(train_here, run, world=2)
    return run.folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [cut, zero, Path.unlink])
@pytest.mark.parametrize("name", ["state.json", ".metadata", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_named_and_the_older_one_is_offered(
    name: str, damage: Callable[[Path], None], run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = run_folder / "checkpoints" / "step-00000008"
    whole = (last / name).read_bytes()
    try:
        damage(last / name)
        command = [*command_line(small_run(run_folder)), "--steps", "10"]
        assert main(["train", *command]) == 1
    finally:
        (last / name).write_bytes(whole)
    output = capsys.readouterr().err
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert str(last) in errors[0]
    assert errors[0].endswith(f"--resume {last.with_name('step-00000004')}")
    assert "Traceback" not in output
    assert "weights_only" not in output


def fail_on(failing: list[int]) -> str:
    """Print a user error on the ranks `failing`, and return the output of this rank."""
    output = io.StringIO()
    if dist.get_rank() in failing:
        with redirect_stderr(output):
            print_error(ValueError("bread is not flour"))
    dist.barrier()  # until then, no rank exits
    return output.getvalue()


@pytest.mark.parametrize("failing", [[0, 1, 2], [1, 2]])
def test_one_rank_prints_an_error(failing: list[int], ranks: Ranks) -> None:
    output = ranks.run(fail_on, failing, world=3)
    assert sorted(output) == ["", "", "error: bread is not flour\n"]
    assert bool(output[0]) == (0 in failing)


def test_without_a_process_group_one_rank_of_each_node_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["train", "--config", "nowhere.toml"]) == 1
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["train", "--config", "nowhere.toml"]) == 1
    assert "nowhere.toml cannot be read" in capsys.readouterr().err


def test_an_internal_error_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise AssertionError("a bug")
    except AssertionError as error:
        print_error(error)
    output = capsys.readouterr().err
    assert "Traceback (most recent call last)" in output
    assert "AssertionError: a bug" in output


def test_files_that_cannot_be_opened_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(PermissionError(13, "Permission denied", "run.toml"))
    assert capsys.readouterr().err == "error: run.toml: Permission denied\n"
