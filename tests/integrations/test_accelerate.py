"""Accelerate on real gloo ranks: a small Llama, with full training and with LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.configs import CONFIGS
from tests.ranks import Ranks, on_a_rank
from tests.searches import short_visits

if TYPE_CHECKING or on_a_rank():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    from tests.integrations.hugging_face import make_accelerator, make_llama, tokens, with_lora
    from zeropp.integrations.accelerate import attach

BF16, FP32 = torch.bfloat16, torch.float32
PLAIN = None


class AcceleratedRun:
    """A model under Accelerate, plain or with zeropp."""

    def __init__(
        self,
        config: zeropp.Config | Literal["auto"] | None,
        *,
        lora: dict[str, Any] | None = None,
        dtype: torch.dtype = FP32,
        accumulate: int = 1,
    ) -> None:
        self.accelerator = make_accelerator(gradient_accumulation_steps=accumulate)
        model: nn.Module = make_llama(dtype, hidden=64 if lora is None else 128)
        if lora is not None:
            model = with_lora(model, **lora)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.trained = sum(p.numel() for p in trained)
        optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.zpp = None if config is None else attach(self.accelerator, self.model, config)
        self.batches = 0

    def step(self) -> float:
        """Run one micro-batch, and an optimizer step after the last micro-batch of a step."""
        data = tokens(self.batches)
        self.batches += 1
        with self.accelerator.accumulate(self.model):
            loss = self.model(input_ids=data, labels=data).loss
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss)

    def bytes_per_parameter(self) -> float:
        """Return the bytes that a node of two ranks has sent across nodes since the ledger's reset, per
        trained parameter."""
        assert self.zpp is not None
        return 2 * self.zpp.ledger.total().across_bytes / self.trained


def _losses(config: zeropp.Config | None, accumulate: int, batches: int) -> list[float]:
    run = AcceleratedRun(config, accumulate=accumulate)
    return [run.step() for _ in range(batches)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_off_is_plain_bit_for_bit_and_the_default_is_close(ranks: Ranks, accumulate: int) -> None:
    plain = ranks.run(_losses, PLAIN, accumulate, 4)
    assert ranks.run(_losses, zeropp.Config.off(), accumulate, 4) == plain
    for mine, exact in zip(ranks.run(_losses, CONFIGS["default"], accumulate, 4), plain, strict=True):
        assert mine == pytest.approx(exact, rel=0.01)
        assert mine != exact


def _accumulate() -> tuple[float, float, int]:
    """Return, for a step of four micro-batches, the bytes across nodes, those of 16-bit FSDP2, and the number
    of units that hold unreduced gradients."""
    run = AcceleratedRun(CONFIGS["default"], accumulate=4)
    zpp = run.zpp
    assert zpp is not None
    held = 0
    for _ in range(4):
        run.step()
    zpp.ledger.reset()
    for _ in range(4):
        run.step()
        held += sum(comms.unit.holds_gradients for comms in zpp.unit_comms)
    baseline = 2 * zpp.ledger.baseline_total(collective="reduce_scatter").across_bytes / run.trained
    return run.bytes_per_parameter(), baseline, held


def test_no_sync_accumulates_inside_the_node(ranks: Ranks) -> None:
    for sent, baseline, held in ranks.run(_accumulate):
        assert 0.5 < sent < 0.85
        assert baseline == pytest.approx(1.5, rel=0.05)  # one ring of 2 bytes over 4 ranks
        assert held == 0


def _resume(config: zeropp.Config, folder: str) -> tuple[list[float], list[float]]:
    run = AcceleratedRun(config)
    for _ in range(2):
        run.step()
    run.accelerator.save_state(folder)
    uninterrupted = [run.step() for _ in range(2)]
    other = AcceleratedRun(config)
    other.step()
    other.batches = 2
    other.accelerator.load_state(folder)
    return uninterrupted, [other.step() for _ in range(2)]


@pytest.mark.parametrize("name", ["default", "four_bit"])
def test_a_resumed_run_continues_bit_for_bit(ranks: Ranks, name: str, tmp_path: Path) -> None:
    for uninterrupted, resumed in ranks.run(_resume, CONFIGS[name], str(tmp_path)):
        assert resumed == uninterrupted
    assert len(list(tmp_path.glob("zeropp-rank*.pt"))) == (4 if name == "four_bit" else 0)


def _auto(folder: str) -> tuple[str | None, str | None, float, float]:
    """Return the chosen Configs of a run and of its resumed copy, and the last losses of zeropp and FSDP2."""
    run, plain = AcceleratedRun("auto", accumulate=2), AcceleratedRun(PLAIN, accumulate=2)
    assert run.zpp is not None
    assert run.zpp.search is not None
    with short_visits:
        while run.zpp.search.chosen is None:
            run.step()
    while plain.batches < run.batches:
        plain.step()
    run.accelerator.save_state(folder)
    other = AcceleratedRun("auto", accumulate=2)
    other.accelerator.load_state(folder)
    assert other.zpp is not None
    assert other.zpp.search is not None
    return run.zpp.search.chosen, other.zpp.search.chosen, run.step(), plain.step()


def test_a_resumed_run_keeps_the_chosen_config(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(_auto, str(tmp_path), env={"LOCAL_WORLD_SIZE": "2"})
    for chosen, resumed, loss, plain in results:
        assert chosen == resumed == results[0][0] is not None
        assert loss == pytest.approx(plain, rel=0.01)


def _lora(dtype: torch.dtype) -> tuple[list[float], list[float], list[float]]:
    """Return the losses with and without the node shard, and the bytes of each step."""
    with_shard, without = AcceleratedRun(CONFIGS["default"], lora={}, dtype=dtype), None
    losses, sent = [], []
    for _ in range(4):
        assert with_shard.zpp is not None
        with_shard.zpp.ledger.reset()
        losses.append(with_shard.step())
        sent.append(with_shard.bytes_per_parameter())
    without = AcceleratedRun(zeropp.Config(node_size=2, secondary=False), lora={}, dtype=dtype)
    return losses, [without.step() for _ in range(4)], sent


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_lora_sends_only_trained_weights(ranks: Ranks, dtype: torch.dtype) -> None:
    """Each unit has adapters in fp32 and a frozen base. A step sends less than a byte per trained
    parameter."""
    for losses, without, sent in ranks.run(_lora, dtype):
        assert losses == without
        assert sent[0] > 5  # the base, once
        assert sent[1:] == pytest.approx([0.791] * 3, abs=0.002)  # the figure of the docs


def _merge(invalidates: bool) -> tuple[float, float, str]:
    """Return the difference between zeropp's and FSDP2's losses, of the merged and the unmerged model."""
    losses = []
    for config in (CONFIGS["default"], PLAIN):
        run = AcceleratedRun(config, lora={})
        for _ in range(2):
            run.step()
        data = tokens(9)
        with torch.no_grad():
            run.model(input_ids=data, labels=data)
            run.model.merge_adapter()
            if run.zpp is not None and invalidates:
                run.zpp.invalidate()
            try:
                merged = float(run.model(input_ids=data, labels=data).loss)
            except zeropp.StaleWeightsError as error:
                return 0.0, 0.0, str(error)
            run.model.unmerge_adapter()
            if run.zpp is not None and invalidates:
                run.zpp.invalidate()
            losses += [merged, float(run.model(input_ids=data, labels=data).loss)]
    return losses[0] - losses[2], losses[1] - losses[3], ""


def test_merged_adapters_are_noticed(ranks: Ranks) -> None:
    """PEFT merges through `.data`, which no hook of torch sees."""
    assert any("call invalidate()" in message for _, _, message in ranks.run(_merge, False))
    for merged, unmerged, message in ranks.run(_merge, True):
        assert message == ""
        assert abs(merged) < 0.01
        assert abs(unmerged) < 0.01


def _two_adapters() -> tuple[list[float], list[float], list[float]]:
    """Return the losses with and without zeropp, and the bytes of each step. Steps train one of two adapters,
    and each step has a forward without adapters."""
    losses: list[list[float]] = []
    sent = []
    for config in (CONFIGS["default"], PLAIN):
        accelerator = make_accelerator()
        model: Any = with_lora(make_llama(hidden=128))
        model.add_adapter("other", model.peft_config["default"])
        adapters = [p for name, p in model.named_parameters() if "lora" in name]
        optimizer = torch.optim.AdamW(adapters, lr=1e-3, fused=True)
        for name, p in model.named_parameters():
            if ".other." in name:
                p.requires_grad_(True)
        model, optimizer = accelerator.prepare(model, optimizer)
        model.set_adapter("default")
        zpp = None if config is None else attach(accelerator, model, config)
        mine = []
        for number, adapter in enumerate(("default", "default", "other", "other", "other", "default")):
            model.set_adapter(adapter)
            data = tokens(number)
            if zpp is not None:
                zpp.ledger.reset()
            with torch.no_grad(), model.disable_adapter():
                mine.append(float(model(input_ids=data, labels=data).loss))
            loss = model(input_ids=data, labels=data).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            mine.append(float(loss))
            if zpp is not None:
                trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
                sent.append(2 * zpp.ledger.total().across_bytes / trained)
        losses.append(mine)
    return losses[0], losses[1], sent


def test_several_adapters_and_a_reference_without_them(ranks: Ranks) -> None:
    for losses, plain, sent in ranks.run(_two_adapters):
        assert losses == pytest.approx(plain, rel=0.01)
        assert sent[3] > 5  # everything, once: the weights are now in three groups
        assert [sent[1], sent[4], sent[5]] == pytest.approx([0.77] * 3, abs=0.25)


def _bad_accelerator() -> str:
    make_accelerator()
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        shared["distributed_type"] = DistributedType.MULTI_CPU
    with pytest.raises(ValueError, match="FullyShardedDataParallelPlugin") as error:
        attach(Accelerator(cpu=True), torch.nn.Linear(2, 2))
    return str(error.value)


def test_an_accelerator_without_fsdp2_is_refused(ranks: Ranks) -> None:
    assert all("MULTI_CPU" in message for message in ranks.run(_bad_accelerator))


def _exact() -> tuple[float, float, float]:
    run = AcceleratedRun(CONFIGS["default"])
    assert run.zpp is not None
    run.step()
    data = tokens(9)
    with torch.no_grad():
        decoded = float(run.model(input_ids=data, labels=data).loss)
        with run.zpp.exact_weights():
            exact = float(run.model(input_ids=data, labels=data).loss)
        run.zpp.remove()
        plain = float(run.model(input_ids=data, labels=data).loss)
    dist.barrier()
    return decoded, exact, plain


def test_an_evaluation_with_exact_weights(ranks: Ranks) -> None:
    for decoded, exact, plain in ranks.run(_exact):
        assert exact == plain != decoded
