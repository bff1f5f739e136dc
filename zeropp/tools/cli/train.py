"""`zeropp train`: train a model, on one rank, or on many under torchrun."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from ... import Config
from ..atomic_files import make_folder
from ..train.config import Preset, RunConfig, read_run, read_toml
from ..train.loop import train
from ..train.metrics import MetricsFile
from ..train.progress import make_progress
from ..train.run_events import RunListener
from ..train.world import join_world
from .options import read_options

STOPPED = 130
"""Exit code of a run that a signal has stopped before its last step. Shells use it for Ctrl-C."""


@dataclass(frozen=True)
class Options:
    """Train a GPT, or any Hugging Face causal LM, with FSDP2 and zeropp.

    Without torchrun there is one rank. torchrun starts many, on one or more nodes:

        torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 3 ... -m zeropp train --config run.toml
    """

    config: Path | None = None
    """TOML file of the run. Options override its values."""
    preset: Preset | None = None
    """Preset of zeropp's Config, which replaces the preset of the file. The options --zeropp.* change the
    Config. "auto" tries several Configs in the first steps, and uses the fastest."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def main(arguments: list[str]) -> int:
    run = parse(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")  # zeropp's begin with "zeropp:"
    with join_world(run.timeout_seconds) as world:
        listeners: list[RunListener] = []
        world.run_on_first(lambda: listeners.extend(_listeners(run)))
        summary = train(run, world, listeners)
    return 0 if summary.is_complete else STOPPED


def parse(arguments: list[str]) -> RunConfig:
    """Return the run of a command line."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path, nargs="?")  # `read_options` below reports errors
    first.add_argument("--preset", nargs="?")
    found, _ = first.parse_known_args(arguments)
    run = read_run({}, found.preset) if found.config is None else read_toml(found.config, found.preset)
    is_auto = run.zeropp == "auto"
    default = Options(found.config, found.preset, replace(run, zeropp=Config()) if is_auto else run)
    run = read_options(Options, arguments, "train", default).run
    if is_auto and run.zeropp != Config():
        raise ValueError(
            "options --zeropp.* are given with preset 'auto', which chooses the Config; remove them, or use "
            "another preset"
        )
    return replace(run, zeropp="auto") if is_auto else run


def _listeners(run: RunConfig) -> list[RunListener]:
    """Create the folder of the run, and return the listeners of its events, on the first rank."""
    make_folder(run.folder)
    listeners: list[RunListener] = [MetricsFile(run.folder), make_progress(run.steps, run.logging.every)]
    if run.logging.tensorboard:
        from ..train.tensorboard import TensorBoard

        listeners.append(TensorBoard(run.folder / "tensorboard"))
    return listeners
