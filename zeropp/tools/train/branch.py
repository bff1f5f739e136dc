"""A run that goes on from an older checkpoint than its last leaves a branch behind, which is kept apart.

    FOLDER/branch-1/metrics.jsonl        the run as it was, to its end
    FOLDER/branch-1/checkpoints/         those after the step that the new run goes on from

The branch is a run folder of its own, for `zeropp compare` and for `--folder FOLDER/branch-1 --resume auto`.
"""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path

from .checkpoint import CHECKPOINTS, name_of, steps_in
from .metrics import FILE_NAME


def keep_branch(folder: Path, checkpoint: Path, step: int) -> Path | None:
    """Move what `folder` has beyond `checkpoint`, saved after `step`, to a branch; None if there is nothing.

    If the checkpoint is one of another folder, this is all that there is: of another run."""
    checkpoints = folder / CHECKPOINTS
    is_own = checkpoint.resolve().parent == checkpoints.resolve()
    left = [found for found in steps_in(checkpoints) if found > step or not is_own]
    metrics = folder / FILE_NAME
    if not left and (is_own or not metrics.exists()):
        return None
    branch = next(path for n in count(1) if not (path := folder / f"branch-{n}").exists())
    (branch / CHECKPOINTS).mkdir(parents=True)
    for found in left:
        (checkpoints / name_of(found)).rename(branch / CHECKPOINTS / name_of(found))
    if metrics.exists():
        shutil.copy2(metrics, branch / FILE_NAME)
        if not is_own:
            metrics.unlink()
    return branch
