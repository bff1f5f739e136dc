"""`zeropp export`: a checkpoint as a Hugging Face folder."""

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
    """Write the model of a run of `zeropp train` as config.json and safetensors, for AutoModelForCausalLM."""

    run: tyro.conf.Positional[Path]
    """The folder of a run (its last checkpoint is taken), or of one checkpoint."""
    folder: tyro.conf.Positional[Path]
    """Where to write; new, or empty."""


def main(arguments: list[str]) -> int:
    options = read_options(Options, arguments, "export")
    checkpoint = find_checkpoint(options.run)
    console = Console(highlight=False, soft_wrap=True)
    with console.status(f"exporting {checkpoint}"):
        export_checkpoint(checkpoint, options.folder)
    console.print(f"{checkpoint} is exported to {options.folder}", markup=False)
    return 0


def find_checkpoint(run: Path) -> Path:
    """The checkpoint itself, or the last one of a run."""
    steps = steps_in(run / "checkpoints")
    if steps:
        return run / "checkpoints" / f"step-{max(steps):08d}"
    if (run / "state.json").exists():
        return run
    raise ValueError(
        f"{run} has no checkpoint; expected the folder of a run of zeropp train, or of a checkpoint"
    )
