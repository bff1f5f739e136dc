from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tests.configs import CONFIGS
from tests.ranks import Ranks
from tests.training import Trainer
from zeropp.integrations.state_files import load_state, save_state


def _on_some_ranks_only(folder: str) -> list[list[float]]:
    """Return the losses after a checkpoint: uninterrupted, resumed from all files, and with one file
    missing."""
    runs = []
    for case in ("uninterrupted", "all files", "one missing"):
        trainer = Trainer(CONFIGS["four_bit"])
        assert trainer.zpp is not None
        for _ in range(2):
            trainer.step()
        if case == "uninterrupted":
            save_state(trainer.zpp, folder)
        else:
            if case == "one missing" and dist.get_rank() == 1:
                next(Path(folder).glob("*rank1.pt")).unlink()
            dist.barrier()
            load_state(trainer.zpp, folder)
        runs.append([trainer.step() for _ in range(2)])
    return runs


def test_all_ranks_load_their_files_or_none_does(ranks: Ranks, tmp_path: Path) -> None:
    for uninterrupted, loaded, one_missing in ranks.run(_on_some_ranks_only, str(tmp_path)):
        assert loaded == uninterrupted
        assert one_missing != uninterrupted


def _nothing_to_save(folder: str) -> None:
    trainer = Trainer(CONFIGS["default"])
    assert trainer.zpp is not None
    save_state(trainer.zpp, folder)
    load_state(trainer.zpp, folder)


def test_a_config_without_history_writes_no_file(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_nothing_to_save, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
