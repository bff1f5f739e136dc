"""Runs a program on one rank, with plain FSDP2 or with zeropp, and notes what a script could see.

[Note: Exact sums]
Lossless Configs add up in another order than FSDP2. So all sums here are exact: weights are multiples of 1/4
below 2, activations and their gradients are integers from -2 to 2. `_Snap` keeps the latter there, and a hook
on every optimizer the former, before zeropp learns of the step.

[Note: Valid programs]
Where FSDP2 asks something of a script, the machine does it: reset_iter_state() and zero_grad() after an
exception, reshard() after an evaluation, no change of requires_grad while gradients wait. What zeropp refuses
while gradients are pending is run, and must be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import zeropp
from tests.configs import CONFIGS
from tests.fuzz.programs import BLOCKS, Action, Program
from zeropp.fsdp2.units import find_units

WIDTH, TOKENS, CLASSES = 12, 7, 5
MOST_BYTES = 1 << 17
"""Memory that zeropp may keep of a model of 2,540 bytes, scratch included."""
EVERY = CONFIGS | {
    "off": zeropp.Config.off(node_size=2),
    "wire16": zeropp.Config.wire16(node_size=2),
    "flat integers": zeropp.Config(
        route="flat", gradients_in_node="int8", gradients_across="int8", secondary=False, node_size=2
    ),
    "bf16 pending": zeropp.Config(gradients_pending="bf16", node_size=2),
}
LOSSLESS = zeropp.Config(weights="none", gradients_in_node="none", gradients_across="none", node_size=2)

Entry = tuple[Any, ...]
"""What could be seen of one action."""


@dataclass(frozen=True)
class Variant:
    """One way to run a program. Variants of one family must show the same."""

    family: str
    """"exact": lossless Configs in the place of those that the program names. "lossy": those themselves."""
    is_plain: bool = False
    """FSDP2 without zeropp."""
    overlap: bool = True
    secondary: bool = True
    resumes: bool = False
    """Whether "resume" saves the state and goes on from it; else it does nothing."""

    def config(self, name: str) -> zeropp.Config:
        config = EVERY[name]
        if self.family == "exact":
            config = EVERY["off"] if config.route == "flat" else LOSSLESS
        can_choose = config.route == "two-hop" and config.weights != "delta-int4"
        return replace(
            config, overlap=self.overlap, secondary=self.secondary if can_choose else config.secondary
        )


class _Snap(torch.autograd.Function):
    """Integers from -2 to 2, in both directions: [Note: Exact sums]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round().clamp(-2, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.round().clamp(-2, 2)


class _MiddleError(Exception):
    """Raised by the program itself."""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.ones(1))
        self.spare = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, with_spare: bool, seen: list[int]) -> Tensor:
        seen += map(_bits, self.parameters())
        y = torch.add(x, self.gate * self.up(x))
        return cast(Tensor, _Snap.apply(y + self.spare.sum() if with_spare else y))  # type: ignore[no-untyped-call]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleDict({name: _Block() for name in BLOCKS})
        self.head = nn.Linear(WIDTH, CLASSES)
        self.seen: list[int] = []
        """Bits of the weights that were computed with."""
        self.known: set[str] = set()
        """Blocks that had a forward outside of inference_mode()."""
        self.fails_in: str | None = None

    def forward(self, tokens: Tensor, plan: str) -> Tensor:
        x = self.embed(tokens)
        middle = len(plan) // 2
        for at, letter in enumerate(plan):
            if at == middle and self.fails_in == "forward":
                raise _MiddleError
            x = self.blocks[letter.lower()](x, letter.isupper(), self.seen)
            self.known.update(() if torch.is_inference_mode_enabled() else letter.lower())
            if at == middle and self.fails_in == "backward" and x.requires_grad:
                x.register_hook(_fail)
        return self.head(x)  # type: ignore[no-any-return]


def _fail(gradient: Tensor) -> None:
    raise _MiddleError


def _bits(tensor: Tensor) -> int:
    """A number for the bits of a tensor, with one zero."""
    return crc32((tensor.detach() + 0.0).contiguous().numpy().tobytes())


def _local(tensor: Any) -> Tensor:
    return tensor.to_local()  # type: ignore[no-any-return]


def _snap_weights(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                local = _local(p)
                local.copy_((local * 4).round_().nan_to_num_().clamp_(-8, 8) / 4)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.25, momentum=0.5),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.25, weight_decay=0.5, fused=True),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=0.25, foreach=True),
    "adamw-loop": lambda params: torch.optim.AdamW(params, lr=0.25, foreach=False),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.25),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.5),
}


class Machine:
    """A model, an optimizer and, unless they are plain, zeropp."""

    def __init__(self, program: Program, variant: Variant) -> None:
        self.variant, self.api = variant, program.api
        generator = torch.Generator().manual_seed(0)
        self.net = _Net()
        with torch.no_grad():
            for p in self.net.parameters():
                p.copy_(torch.randint(-4, 5, p.shape, generator=generator) / 4)
        for block in self.net.blocks.values():
            fully_shard(block)
        self.root = cast(Any, fully_shard(self.net))
        self.root.set_reduce_scatter_unused_params(program.sends_unused or variant.family == "exact")
        self.params = list(self.net.parameters())
        self.units = find_units(self.net)
        self.optimizer = self._optimizer("sgd")
        self.data = torch.Generator().manual_seed(1 + dist.get_rank())
        self.saved = self._copy_of_weights()
        self.zpp: zeropp.ZeroPP | None = None
        self.syncs = True
        self.sent = 0
        """Bytes in the ledger after the last action."""
        self.apply(program.start)

    def run(self, action: Action) -> Entry:
        """What could be seen of the action. The last of it is what there is after any action."""
        seen: list[int] = []
        self.net.seen = seen
        name, *args = action
        said = getattr(self, name)(*args)
        if self.zpp is not None:
            self._check_books(self.zpp)
        pending = self.pending
        gradients = [] if pending else [p.grad is not None and _bits(_local(p.grad)) for p in self.params]
        weights = [_bits(_local(p)) for p in self.params]
        return said, tuple(seen), pending, tuple(gradients), tuple(weights)

    @property
    def pending(self) -> bool:
        """Whether gradients wait for cross-node sync, as zeropp says it, or would."""
        if self.zpp is not None:
            return any(comms.has_pending for comms in self.zpp.unit_comms)
        return self.api != "fsdp2" and self._holds

    @property
    def _holds(self) -> bool:
        return any(unit.holds_gradients for unit in self.units)

    def close(self) -> None:
        self._drop()
        if self.zpp is not None:
            self.zpp.remove()

    # Actions, by name.

    def backward(self, *plans: str) -> str:
        loss = sum((self._loss(plan) for plan in plans), torch.zeros(()))
        self.net.seen.append(_bits(loss))
        loss.backward()  # type: ignore[no-untyped-call]
        return "done"

    def step(self, how: str) -> str:
        if how == "plain":
            return self._refused_if_pending(self.optimizer.step)

        def closure() -> float:
            self.optimizer.zero_grad()
            self._plain_drops()
            self.backward("abc")
            return 0.0

        if not self.syncs and self.api != "fsdp2":
            return "skipped"  # the closure's own gradients would be pending
        self.optimizer.step(closure)
        return "done"

    def zero(self, how: str) -> str:
        if how == "module":
            self.root.reshard()
            self.net.zero_grad()
        elif how == "halves":
            for half in (self.params[::2], self.params[1::2]):
                torch.optim.SGD(half, lr=0.1).zero_grad()
        else:
            self._zero_grad(how, self._holds_back)
        self._plain_drops()
        return "done"

    def sync(self, syncs: bool) -> str:
        self.syncs = syncs
        if self.zpp is not None and self.api == "cross":
            self.zpp.set_requires_cross_node_sync(syncs)
        else:
            self.root.set_requires_gradient_sync(syncs)
        return "done"

    def evaluate(self, plan: str, how: str) -> str:
        is_known = self.net.known.issuperset(plan.lower())  # FSDP2 refuses weights that inference has made
        mode = torch.inference_mode() if how == "inference" and is_known else torch.no_grad()
        exact = self.zpp.exact_weights() if how == "exact" and self.zpp is not None else nullcontext()
        with exact, mode:
            self.net.seen.append(_bits(self._loss(plan)))
        self._reshard()
        return "done"

    def fail(self, plan: str, where: str, zero: str) -> str:
        holds_back = self._holds_back  # not what the failed backward leaves behind
        self.net.fails_in = where
        try:
            self.backward(plan)
        except _MiddleError:
            pass
        finally:
            self.net.fails_in = None
        self.root.reset_iter_state()
        for unit in self.units:
            unit.drop_held_gradients()
        self._zero_grad(zero, holds_back)
        return "done"

    def edit(self, block: str, how: str) -> str:
        with torch.no_grad():
            for p in self.net.blocks[block].parameters():
                if how == "data":
                    p.data.neg_()
                elif how == "copy":
                    p.copy_(-p)
                else:
                    p.neg_()
        return self.invalidate() if how == "data" else "done"

    def stale(self, block: str, plan: str) -> str:
        """A change that nobody tells zeropp: the next use raises, or has the right weights."""
        for p in self.net.blocks[block].parameters():
            _local(p.data).neg_()
        state = self.data.get_state()
        try:
            return self.evaluate(plan, "no_grad")
        except zeropp.StaleWeightsError:
            self.net.seen.clear()
            gradients = [(p, p.grad) for p in self.params]
            self.root.reset_iter_state()
            for p, gradient in gradients:
                p.grad = gradient  # from torch 2.15 on, the reset drops it
            self._reshard()
            self.invalidate()
            self.data.set_state(state)
            return self.evaluate(plan, "no_grad")
        finally:
            self.invalidate()

    def save(self) -> str:
        self.saved = self._copy_of_weights()
        return "done"

    def load(self, what: str) -> str:
        if what == "saved":
            self.net.load_state_dict(self.saved)
        elif what == "own":
            self.net.load_state_dict(self.net.state_dict())
        else:
            self.net.blocks[what].load_state_dict(self.net.blocks[what].state_dict())
        return "done"

    def resume(self) -> str:
        if self.pending or self.zpp is None or not self.variant.resumes:
            return "done"
        state, config = self.zpp.state_dict(), self.zpp.config
        self.remove()
        self._install(config)
        return "done" if self.zpp.load_state_dict(state) else "not used"

    def set_config(self, name: str) -> str:
        if self.zpp is None:
            return self._refused_if_pending(lambda: None)
        return self._refused_if_pending(self.zpp.set_config, self.variant.config(name))

    def remove(self) -> str:
        zpp = self.zpp
        said = self._refused_if_pending(zpp.remove if zpp is not None else lambda: None)
        if said == "done" and zpp is not None:
            self.zpp, self.sent = None, 0
            self.sync(self.syncs)
        return said

    def apply(self, name: str) -> str:
        if self.pending:
            return "skipped"  # refused, unless it is the same Config
        if not self.variant.is_plain:
            self.remove()
            self._install(self.variant.config(name))
        return "done"

    def freeze(self, block: str, what: str) -> str:
        if self.pending or self._holds:
            return "skipped"
        up = cast(_Block, self.net.blocks[block]).up
        for p in self.net.blocks[block].parameters() if what == "all" else [up.bias]:
            p.requires_grad_(not p.requires_grad)
        return self.unshard(block, False)  # when FSDP2 looks at it

    def flush(self) -> str:
        if self.api == "fsdp2" and not self.syncs:
            return "skipped"
        if self.zpp is not None:
            self.zpp.flush()
        elif self.pending:
            FSDPModule.set_requires_gradient_sync(self.root, True)
            for unit in reversed(self.units):
                unit.reduce_zeros()
            FSDPModule.set_requires_gradient_sync(self.root, self.syncs)
        return "done"

    def drop(self) -> str:
        self._drop()
        return self.zero("none")  # where zeropp has gradients of zero, FSDP2 has none

    def release(self) -> str:
        return self._refused_if_pending(self.zpp.release if self.zpp is not None else lambda: None)

    def invalidate(self) -> str:
        if self.zpp is not None:
            self.zpp.invalidate()
        return "done"

    def unshard(self, block: str, is_async: bool) -> str:
        unit = cast(Any, self.net.blocks[block])
        handle = unit.unshard(async_op=is_async)
        if handle is not None:
            handle.wait()
        self.net.seen += map(_bits, unit.parameters())
        unit.reshard()
        return "done"

    def clip(self) -> str:
        if self.pending:
            return "skipped"
        with_gradient = [p for p in self.params if p.grad is not None]
        if with_gradient:
            nn.utils.clip_grad_norm_(with_gradient, 64.0)
        return "done"

    def look(self) -> str:
        if self.zpp is not None:
            assert self.zpp.summary()
            assert self.zpp.ledger.table()
            assert self.zpp.state_dict()["rank"] == dist.get_rank()
            assert zeropp.apply(self.net, self.zpp.config) is self.zpp
        return "done"

    def use_optimizer(self, name: str) -> str:
        self.optimizer = self._optimizer(name)
        return "done"

    # What they are made of.

    @property
    def _holds_back(self) -> bool:
        """Whether gradients wait, or would. FSDP2 leaves None where it reduced nothing, and zeropp zeros."""
        return self.pending or not self.syncs

    def _zero_grad(self, how: str, holds_back: bool) -> None:
        is_exact = self.variant.family == "exact"
        self.optimizer.zero_grad(set_to_none=how == "none" or (is_exact and holds_back))

    def _optimizer(self, name: str) -> torch.optim.Optimizer:
        optimizer = OPTIMIZERS[name](self.params)
        optimizer.register_step_post_hook(_snap_weights)
        return optimizer

    def _install(self, config: zeropp.Config) -> None:
        self.zpp = zeropp.apply(self.net, config)
        if self.api == "follow":
            self.zpp.follow_no_sync()
        if not self.syncs and self.api == "cross":
            self.root.set_requires_gradient_sync(True)  # which stood for it while zeropp was away
            self.sync(False)

    def _copy_of_weights(self) -> dict[str, Any]:
        return {name: p.detach().clone() for name, p in self.net.state_dict().items()}

    def _loss(self, plan: str) -> Tensor:
        tokens = torch.randint(TOKENS, (6,), generator=self.data)
        targets = torch.randint(-1, 2, (6, CLASSES), generator=self.data)
        return (self.net(tokens, plan) * targets).sum()  # type: ignore[no-any-return]

    def _reshard(self) -> None:
        for unit in self.units:
            unit.module.reshard()

    def _refused_if_pending(self, act: Callable[..., Any], *args: Any) -> str:
        """Run it; while gradients are pending, zeropp must refuse it, and does nothing."""
        pending = self.pending
        if pending and self.zpp is None:
            return "refused"
        try:
            act(*args)
        except RuntimeError as error:
            if not pending or not any(text in str(error) for text in ("pending", "not summed")):
                raise
            return "refused"
        assert not pending, f"{act} ran while gradients were pending"
        return "done"

    def _plain_drops(self) -> None:
        """zero_grad() of a zeropp drops what is pending; that of FSDP2 does not drop what FSDP2 holds."""
        if self.zpp is None and self.api != "fsdp2":
            self._drop()

    def _drop(self) -> None:
        if self.zpp is not None:
            self.zpp.drop_pending_gradients()
        else:
            for unit in self.units if self.api != "fsdp2" else []:
                unit.drop_held_gradients()

    def _check_books(self, zpp: zeropp.ZeroPP) -> None:
        """The ledger never counts down, and memory has a bound, however long the program is."""
        sent, kept = zpp.ledger.total().wire_bytes, zpp.communication_bytes
        assert sent >= self.sent, f"the ledger has {sent} bytes after {self.sent}"
        assert kept <= MOST_BYTES, f"zeropp keeps {kept} bytes; expected {MOST_BYTES} at most"
        self.sent = sent
