"""`zeropp export`: export a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from ..train.checkpoint import steps_in
from ..train.export import export_checkpoint
from .options import read_options


@dataclass
class Options:
    """Export the model of a `zeropp train` run as config.json and safetensors, for AutoModelForCausalLM."""

    run: tyro.conf.Positional[Path]
    """Folder of a run, for its last checkpoint, or of one checkpoint."""
    folder: tyro.conf.Positional[Path]
    """Output folder: new, or empty."""


def main(arguments: list[str]) -> int:
    options = read_options(Options, arguments, "export")
    checkpoint = find_checkpoint(options.run)
    console = Console(highlight=False, soft_wrap=True)
    with console.status(f"exporting {checkpoint}"):
        export_checkpoint(checkpoint, options.folder)
    console.print(f"exported {checkpoint} to {options.folder}", markup=False)
    return 0


def find_checkpoint(run: Path) -> Path:
    """Return the last checkpoint of a run, or `run` itself if it is a checkpoint."""
    steps = steps_in(run / "checkpoints")
    if steps:
        return run / "checkpoints" / f"step-{max(steps):08d}"
    if (run / "state.json").exists():
        return run
    raise ValueError(
        f"{run} has no checkpoint; expected the folder of a run of zeropp train, or of a checkpoint"
    )
