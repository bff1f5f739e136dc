"""Branches: when a run resumes from an older checkpoint than its last one, the later steps move to a branch.

    FOLDER/branch-1/metrics.jsonl        all steps of the earlier run
    FOLDER/branch-1/checkpoints/         checkpoints after the step at which the new run resumes

A branch is a complete run folder: `zeropp compare` and `--folder FOLDER/branch-1 --resume auto` accept it.
"""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path

from .checkpoint import CHECKPOINTS, name_of, steps_in
from .metrics import FILE_NAME


def keep_branch(folder: Path, checkpoint: Path, step: int) -> Path | None:
    """Move the part of the run in `folder` that comes after `checkpoint` (of step `step`) to a branch.

    Return the branch, or None if no part comes after it. If `checkpoint` belongs to another folder,
    everything in `folder` belongs to another run and moves."""
    checkpoints = folder / CHECKPOINTS
    is_own = checkpoint.resolve().parent == checkpoints.resolve()
    later_steps = [found for found in steps_in(checkpoints) if found > step or not is_own]
    metrics = folder / FILE_NAME
    if not later_steps and (is_own or not metrics.exists()):
        return None
    branch = next(path for n in count(1) if not (path := folder / f"branch-{n}").exists())
    (branch / CHECKPOINTS).mkdir(parents=True)
    for found in later_steps:
        (checkpoints / name_of(found)).rename(branch / CHECKPOINTS / name_of(found))
    if metrics.exists():
        shutil.copy2(metrics, branch / FILE_NAME)  # a copy: the resumed run keeps its steps up to `step`
        if not is_own:
            metrics.unlink()
    return branch
