"""Graphs of a device: CPU has none, so torch's own question about them is answered by the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import zeropp
from tests.ranks import Ranks
from tests.training import Trainer
from zeropp.comm.cuda_graphs import is_capturing, refuse_capture

CPU = torch.device("cpu")


@contextmanager
def capturing() -> Iterator[None]:
    """torch.cpu says what torch.cuda says while the current stream is being captured."""
    torch.cpu.is_current_stream_capturing = lambda: True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del torch.cpu.is_current_stream_capturing  # type: ignore[attr-defined]


def test_a_captured_stream_is_refused() -> None:
    refuse_capture("blocks.0", CPU)
    with capturing(), pytest.raises(RuntimeError, match=r"'blocks.0' communicates while a graph of cpu"):
        refuse_capture("blocks.0", CPU)


def test_a_device_that_torch_was_built_without_is_not_asked() -> None:
    if not torch.cuda.is_available():
        assert not is_capturing(torch.device("cuda"))


def _capture(config: zeropp.Config) -> dict[str, str]:
    trainer = Trainer(config)
    trainer.step()
    errors = {"forward": "", "backward": ""}
    loss = trainer.net(torch.zeros(2, 2, dtype=torch.long)).sum()
    try:
        with capturing():
            loss.backward()
    except RuntimeError as error:
        errors["backward"] = str(error)
    trainer = Trainer(config)
    try:
        with capturing():
            trainer.evaluate()
    except RuntimeError as error:
        errors["forward"] = str(error)
    return errors


@pytest.mark.parametrize("config", [zeropp.Config(node_size=2), zeropp.Config.wire16(node_size=2)])
def test_gathers_and_reductions_refuse_to_be_captured(ranks: Ranks, config: zeropp.Config) -> None:
    for errors in ranks.run(_capture, config):
        assert all("training.disable_cuda_graphs" in error for error in errors.values())


def test_plain_fsdp2_can_be_captured(ranks: Ranks) -> None:
    for errors in ranks.run(_capture, zeropp.Config.off(node_size=2)):
        assert errors == {"forward": "", "backward": ""}
