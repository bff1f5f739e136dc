"""`zeropp train`: train a model, on one rank or under torchrun on many."""

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
"""The exit code of a run that a signal has stopped before its last step: what a shell expects of Ctrl-C."""


@dataclass(frozen=True)
class Options:
    """Train a GPT, or any Hugging Face causal LM, with FSDP2 and zeropp.

    Alone it is one rank; torchrun starts many, on one node or more:

        torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 3 ... -m zeropp train --config run.toml
    """

    config: Path | None = None
    """A TOML file; options change what it says."""
    preset: Preset | None = None
    """What zeropp sends, instead of the preset in the file; the options --zeropp.* change it. "auto" tries
    some in the first steps, and keeps the fastest."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def main(arguments: list[str]) -> int:
    run = parse(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")  # ours begin with "zeropp:"
    with join_world(run.timeout_seconds) as world:
        listeners: list[RunListener] = []
        world.run_on_first(lambda: listeners.extend(_listeners(run)))
        summary = train(run, world, listeners)
    return 0 if summary.is_complete else STOPPED


def parse(arguments: list[str]) -> RunConfig:
    """The run that a command line describes."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path, nargs="?")  # what is wrong with these is said below
    first.add_argument("--preset", nargs="?")
    found, _ = first.parse_known_args(arguments)
    run = read_run({}, found.preset) if found.config is None else read_toml(found.config, found.preset)
    is_auto = run.zeropp == "auto"
    default = Options(found.config, found.preset, replace(run, zeropp=Config()) if is_auto else run)
    run = read_options(Options, arguments, "train", default).run
    if is_auto and run.zeropp != Config():
        raise ValueError(
            "options --zeropp.* are given with preset 'auto', which chooses a Config by itself; choose "
            "another preset, or leave them out"
        )
    return replace(run, zeropp="auto") if is_auto else run


def _listeners(run: RunConfig) -> list[RunListener]:
    """Who is told of the run, on the first rank; makes the folder that they write to."""
    make_folder(run.folder)
    listeners: list[RunListener] = [MetricsFile(run.folder), make_progress(run.steps, run.logging.every)]
    if run.logging.tensorboard:
        from ..train.tensorboard import TensorBoard

        listeners.append(TensorBoard(run.folder / "tensorboard"))
    return listeners
