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


def test_it_runs_the_demonstration_where_there_is_nothing_else(wheel: Path, tmp_path: Path) -> None:
    """No lab, no kernels: what `pip install zeropp` brings must do."""
    environment = tmp_path / "empty"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    (site,) = environment.glob("lib/python*/site-packages")
    link_packages(site, ["numpy", "rich", "torch", "tyro"])
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    zeropp = environment / "bin" / "zeropp"
    assert run(zeropp, "--version", cwd=tmp_path, PYTHONPATH="") == f"zeropp {__version__}\n"
    shown = run(zeropp, "demo", "--steps", "1", cwd=tmp_path, PYTHONPATH="")
    assert "4 local ranks that play 2 nodes" in shown
    assert "There is no network to measure here: on local ranks, " in shown.splitlines()[-1]
    assert (tmp_path / "runs" / "demo" / "report.html").exists()
    assert (tmp_path / "runs" / "demo" / "zeropp" / "checkpoints" / "step-00000001").is_dir()
