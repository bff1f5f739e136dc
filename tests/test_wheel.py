"""The wheel, as `python -m build` makes it, in an environment that has nothing but what it asks for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from zeropp import __version__

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "zeropp")
SECONDS = 600.0  # for any one command, on any machine


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def needed(name: str, found: dict[str, Distribution]) -> None:
    """Add what a package needs, without extras, to `found`."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in found:
        return
    found[key] = distribution(name)
    for text in found[key].requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            needed(requirement.name, found)


def link_packages(site: Path, names: list[str]) -> None:
    """Put packages of this environment, and what they need, into another."""
    found: dict[str, Distribution] = {}
    for name in names:
        needed(name, found)
    for package in found.values():
        for top in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(package.locate_file(top)))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, which setuptools writes to."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", cwd=folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_it_has_one_version_the_licence_and_types(wheel: Path, tmp_path: Path) -> None:
    assert wheel.name == f"zeropp-{__version__}-py3-none-any.whl"
    shutil.unpack_archive(wheel, tmp_path, "zip")
    about = tmp_path / f"zeropp-{__version__}.dist-info"
    assert "License-Expression: Apache-2.0" in (about / "METADATA").read_text()
    assert (about / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (tmp_path / "zeropp" / "py.typed").exists()
    assert not (tmp_path / "tests").exists()


def install(wheel: Path, folder: Path, packages: list[str]) -> Path:
    """Make an environment with zeropp, these packages and what they need. Returns its bin folder."""
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    (site,) = environment.glob("lib/python*/site-packages")
    link_packages(site, packages)
    pip = (sys.executable, "-m", "pip", "--python", environment / "bin" / "python")
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return environment / "bin"


TRAIN = """
import sys
import torch, torch.distributed as dist, zeropp
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
for layer in net:
    fully_shard(layer)
fully_shard(net)
zpp = zeropp.apply(net, zeropp.Config(node_size=1))
optimizer = torch.optim.SGD(net.parameters())
for _ in range(2):
    net(torch.ones(2, 64)).sum().backward()
    optimizer.step()
zpp.summary(), zpp.ledger.table(), zpp.state_dict()
ours = {name for name in sys.modules if name.startswith("zeropp.tools")}
assert not ours and "tyro" not in sys.modules, ours
assert zpp.ledger.total().across_bytes
dist.destroy_process_group()
print("trained")
"""


def test_training_needs_torch_numpy_and_rich_alone(wheel: Path, tmp_path: Path) -> None:
    """The library imports no tool, and none of the tools' packages."""
    programs = install(wheel, tmp_path, ["numpy", "rich", "torch"])
    (tmp_path / "train.py").write_text(TRAIN)
    command = (programs / "python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert run(*command, "train.py", cwd=tmp_path, PYTHONPATH="").count("trained") == 2
    failed = subprocess.run(
        [str(programs / "zeropp"), "demo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert failed.returncode == 1
    assert "pip install 'zeropp[cli]'" in " ".join(failed.stderr.split())


def test_it_runs_the_demonstration_where_there_is_nothing_else(wheel: Path, tmp_path: Path) -> None:
    """No lab and no kernels: what `pip install 'zeropp[cli]'` brings is enough."""
    zeropp = install(wheel, tmp_path, ["numpy", "rich", "torch", "tyro"]) / "zeropp"
    assert run(zeropp, "--version", cwd=tmp_path, PYTHONPATH="") == f"zeropp {__version__}\n"
    shown = run(zeropp, "demo", "--steps", "1", cwd=tmp_path, PYTHONPATH="")
    assert "4 local ranks that play 2 nodes" in shown
    assert "There is no network to measure here: on local ranks, " in shown.splitlines()[-1]
    assert (tmp_path / "runs" / "demo" / "report.html").exists()
    assert (tmp_path / "runs" / "demo" / "zeropp" / "checkpoints" / "step-00000001").is_dir()
