"""torchtitan's trainer on real gloo ranks, with its debug Llama and its command line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import zeropp
from tests.configs import CONFIGS
from tests.ranks import Ranks
from zeropp.integrations.torchtitan import attach, with_zeropp

# Only jobs on ranks import torchtitan: see tests/integrations/titan.py.

PLAIN = None


@pytest.fixture(scope="module", autouse=True)
def _import_framework(ranks: Ranks) -> None:
    ranks.import_first("tests.integrations.titan")


class TitanRun(NamedTuple):
    """Results of two training steps."""

    losses: list[float]
    sent: float = 0.0
    """Bytes across nodes per parameter, in the second step."""
    timeouts: frozenset[float] = frozenset()
    """Timeouts of hop groups, in seconds."""


def _train(config: zeropp.Config | None, folder: str, accumulate: int, chunked_loss: bool) -> TitanRun:
    from tests.integrations import titan

    trainer_config = titan.trainer_config(folder, accumulate=accumulate, chunked_loss=chunked_loss)
    if config is not None:
        trainer_config = with_zeropp(trainer_config, config)
    losses, trainer = titan.train(trainer_config)
    if config is None:
        return TitanRun(losses)
    zpp: zeropp.ZeroPP = trainer.zpp
    parameters = sum(p.numel() for p in trainer.model_parts[0].parameters())
    groups = [hop.group for comms in zpp.unit_comms if comms.pair for hop in comms.pair.all_gather.hops]
    backends = [group._get_backend(torch.device("cpu")) for group in groups if group is not None]
    return TitanRun(
        losses,
        2 * zpp.ledger.total().across_bytes / parameters,  # two ranks a node
        frozenset(backend.options._timeout.total_seconds() for backend in backends),
    )


@pytest.mark.parametrize(
    ("accumulate", "chunked_loss", "sent"),
    [
        (1, True, 0.766),  # 0.258 of it are gradients
        (4, False, 0.766),
        (2, True, 0.766),  # the unit of norm and head is used twice, and crosses nodes once
    ],
)
def test_off_is_plain_bit_for_bit_and_the_default_is_close(
    ranks: Ranks, accumulate: int, chunked_loss: bool, sent: float, tmp_path: Path
) -> None:
    """The bytes are those of docs/frameworks.md."""
    options = (str(tmp_path), accumulate, chunked_loss)
    plain = ranks.run(_train, PLAIN, *options)
    off = ranks.run(_train, zeropp.Config.off(), *options)
    default = ranks.run(_train, CONFIGS["default"], *options)
    for exact, same, close in zip(plain, off, default, strict=True):
        assert same.losses == exact.losses
        assert close.losses == pytest.approx(exact.losses, rel=0.01)
        assert close.losses != exact.losses
        assert close.timeouts == {100.0}  # torchtitan's train_timeout_seconds, not the timeout of the start
        assert close.sent == pytest.approx(sent, abs=0.001)


def _resume(config: zeropp.Config, folder: str) -> tuple[list[float], list[float]]:
    """Return the losses after the second step, of an uninterrupted run and of one resumed from its
    checkpoint."""
    from tests.integrations import titan

    options: dict[str, Any] = {"steps": 3, "accumulate": 2, "chunked_loss": True, "saves": True}
    uninterrupted, _ = titan.train(with_zeropp(titan.trainer_config(folder, **options), config))
    again = titan.trainer_config(folder, **options)
    again.checkpoint.load_step = 2
    resumed, _ = titan.train(with_zeropp(again, config))
    return uninterrupted[2:], resumed


@pytest.mark.parametrize("name", ["default", "four_bit"])
def test_a_resumed_run_continues_bit_for_bit(ranks: Ranks, name: str, tmp_path: Path) -> None:
    for uninterrupted, resumed in ranks.run(_resume, CONFIGS[name], str(tmp_path)):
        assert resumed == uninterrupted
    files = list(tmp_path.glob("checkpoint/step-2/zeropp-rank*.pt"))
    assert len(files) == (4 if name == "four_bit" else 0)


def _from_the_command_line() -> tuple[bool, int, bool]:
    from tests.integrations import titan

    config = titan.parse(["--module", "tests.integrations.titan", "--config", "configured"])
    trainer = config.build()
    recorded = trainer.config.to_dict()["zeropp"]["weights"] == CONFIGS["default"].weights
    return recorded, len(trainer.zpp.unit_comms), trainer.config.training.disable_cuda_graphs


def test_a_config_from_the_command_line(ranks: Ranks) -> None:
    """The four units are the embedding, two layers, and norm with head. The root has no parameters."""
    assert ranks.run(_from_the_command_line) == [(True, 4, True)] * 4


def _refused(folder: str) -> tuple[str, list[str]]:
    from tests.integrations import titan

    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    trainer = titan.trainer_config(folder, saves=True).build()
    trainer.checkpointer.folder = "gs://bucket/run"
    logging.getLogger("zeropp").addHandler(handler)
    attach(trainer, CONFIGS["four_bit"])
    logging.getLogger("zeropp").removeHandler(handler)
    trainer.config.parallelism.pipeline_parallel_degree = 2
    with pytest.raises(ValueError, match="expected 1") as error:
        attach(trainer)
    trainer.close()
    return str(error.value), warnings


def test_limits_are_errors_or_warnings(ranks: Ranks, tmp_path: Path) -> None:
    for message, warnings in ranks.run(_refused, str(tmp_path)):
        assert "pipeline_parallel_degree is 2" in message
        assert any("gs://bucket/run" in warning for warning in warnings)
