"""`apply`, and the `ZeroPP` it returns: what every unit sends, and what happens to the model meanwhile.

[Note: What tells us that weights changed]
Optimizer steps: torch's global step hooks, see optimizer_steps.py; only units with a parameter in that
optimizer count, and of those only what it can change, so frozen units are sent once and never again.
State-dict loads: a hook on every module that owns a parameter of the unit. In-place operations on a
parameter: its version, see [Note: Operations on parameters] in fsdp.py. Anything else: `ZeroPP.invalidate()`.

[Note: Lifetime]
FSDP2 holds our comms, our comms hold their `ZeroPP` (as `owner`), torch's global hooks hold it only weakly.
When the model goes, everything goes.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from rich.table import Table
from torch import nn

from .comm import Alarm, AllGather, Ledger, ReduceScatter, Scratch
from .comm.ledger import render
from .config import Config
from .fsdp import Unit, find_units
from .kept import Kept
from .optimizer_steps import OptimizerSteps
from .unit_comms import UnitComms, choose_configs, decide_comms
from .zero_grad import listen

logger = logging.getLogger("zeropp")

NUMBERS = ("parameters", "kept bytes", "will keep", "pending")
"""Columns of `ZeroPP.summary`."""


class ZeroPP:
    """zeropp on one model. Made by `apply`."""

    def __init__(
        self,
        config: Config,
        overrides: Mapping[str, Config],
        unit_comms: list[UnitComms],
        ledger: Ledger,
        scratch: Scratch,
        alarm: Alarm,
    ) -> None:
        self.config = config
        self.overrides = dict(overrides)
        self.unit_comms = unit_comms
        self.ledger = ledger
        """What this rank sent, per unit, collective and hop."""
        self._scratch = scratch
        self._alarm = alarm
        weakref.finalize(self, alarm.log_if_known)
        self._handles: list[Any] = []
        self._accumulates = False

    def summary(self) -> str:
        """What every unit sends, and how, or why it was left alone; as text.

        Bytes on this rank: "kept bytes" are what it keeps of the unit now, "will keep" what it keeps after a
        step, and "pending" what comes on top in one that accumulates without cross-node sync. Scratch, which
        all units share, is not in it: see `communication_bytes`.
        """
        self._alarm.raise_if_any()
        rows = [comms.describe() for comms in self.unit_comms]
        table = Table(title=f"zeropp on {len(rows)} units")
        for column in rows[0]:
            table.add_column(column, justify="right" if column in NUMBERS else "left")
        for row in rows:
            table.add_row(*row.values())
        return render(table)

    @property
    def communication_bytes(self) -> int:
        """Memory that zeropp keeps on this rank: node shards, pending gradients, kept errors and scratch."""
        return self._scratch.nbytes + sum(comms.keeps().total for comms in self.unit_comms)

    @property
    def node_shard_bytes(self) -> int:
        """The part of `communication_bytes` that is node shards: what `Config.secondary` costs."""
        return sum(comms.keeps().node_shard for comms in self.unit_comms)

    @property
    def nodes(self) -> int:
        """How many nodes the units of the model are sharded over. HSDP that shards inside each node: one."""
        topologies = (comms.topology for comms in self.unit_comms)
        return max((len(topology.nodes) for topology in topologies if topology is not None), default=1)

    @property
    def has_history(self) -> bool:
        """Whether something is kept that does not follow from the weights: a reference of differences, kept
        errors, the count of reductions for rounding at random. Then a checkpoint must hold `state_dict()`."""
        return any(comms.has_history for comms in self.unit_comms)

    def invalidate(self) -> None:
        """Say that weights were changed by other means than an optimizer step or `load_state_dict`.

        The next gather of every unit sends the weights across nodes again. Call it on every rank.
        """
        for _, all_gather, _ in self._installed():
            all_gather.invalidate()

    def set_config(self, config: Config, *, overrides: Mapping[str, Config] | None = None) -> None:
        """Go on with another Config, between two steps; call it on every rank.

            zpp = zeropp.apply(model, zeropp.Config(gradients_in_node="bf16", gradients_across="bf16"))
            for step in range(steps):
                if step == 100:
                    zpp.set_config(zeropp.Config())

        The ledger goes on counting. Node shards, references of differences and kept errors stay if they mean
        the same under the new Config; else the weights are sent anew, and kept errors start at zero.
        """
        overrides = dict(overrides or {})
        _check_configs(config, overrides)
        self._raise_if_pending()
        if not self._handles:
            raise RuntimeError("set_config after remove(); call zeropp.apply(model, config)")
        # Everything that can fail comes before the first change.
        chosen = choose_configs([comms.unit for comms in self.unit_comms], config, overrides)
        unit_comms = [
            decide_comms(unit, own, self.ledger, self._scratch, self._alarm) for unit, own in chosen.items()
        ]
        for old, new in zip(self.unit_comms, unit_comms, strict=True):
            if old.pair is not None and new.pair is not None:
                new.pair.take_over(old.pair)
        self._remove_hooks()
        for old, new in zip(self.unit_comms, unit_comms, strict=True):
            if not old.requires_sync:
                old.set_sync(True)  # FSDP2's switches, which the new Config may not use
                new.set_sync(False)
            new.unit.send_unused_as_set()
        self.config, self.overrides, self.unit_comms = config, overrides, unit_comms
        self._install()
        if self._accumulates:
            self._prepare_to_accumulate()

    def state_dict(self) -> dict[str, Any]:
        """What this rank must save for a run that goes on bit for bit: references of weight differences, kept
        errors, and the count of reductions that stochastic rounding depends on. Only tensors and numbers, and
        copies: they do not change with the next step.

        Every rank saves its own, beside the model and the optimizer; `torch.load` with `weights_only=True`
        reads it.
        """
        self._alarm.raise_if_any()
        units = {
            comms.unit.name: {"weights": gather.state_dict(), "gradients": reduce.state_dict()}
            for comms, gather, reduce in self._installed()
        }
        return {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "units": units}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` of this rank returned. Call it after loading the model: loading
        weights forgets all that is kept. Its tensors may be on any device. A run on other ranks goes on
        without it: the weights are sent anew, and kept errors start at zero."""
        installed = {comms.unit.name: (gather, reduce) for comms, gather, reduce in self._installed()}
        mine = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        theirs = {name: state.get(name) for name in mine}
        if theirs != mine or state["units"].keys() != installed.keys():
            raise ValueError(
                f"the state of zeropp is of {theirs} and units {sorted(state.get('units', ()))}; expected "
                f"{mine} and {sorted(installed)}: load the file that this rank has saved, or go on without it"
            )
        for name, (gather, reduce) in installed.items():
            gather.load_state_dict(state["units"][name]["weights"])
            reduce.load_state_dict(state["units"][name]["gradients"])

    def set_requires_cross_node_sync(self, requires_sync: bool) -> None:
        """Turn cross-node gradient traffic off for all but the last micro-batch of a step.

        Does the right thing for any Config and mesh. While off: on two hops, gradients are reduced inside the
        node only and add up there in fp32. On a flat route nothing is reduced, and FSDP2 keeps full gradients
        (its `set_requires_gradient_sync`). With HSDP that shards inside each node, FSDP2 leaves out the
        all-reduce (`set_requires_all_reduce`). Turn it on again before the last micro-batch's backward; an
        optimizer step with gradients still pending is an error.

            for i, batch in enumerate(micro_batches):
                zpp.set_requires_cross_node_sync(i == len(micro_batches) - 1)
                model(batch).backward()
            optimizer.step()

        `zero_grad()` of the model or its optimizers drops pending gradients with the rest. A hook that takes
        `.grad` in backward gets zeros while sync is off, and all of it in the end; between two backwards
        `.grad` must stay: see [Note: Dropped or taken]. From the first call on, a parameter that gets no
        gradient at all has gradient zero instead of None (FSDP2's `set_reduce_scatter_unused_params`): all
        micro-batches must agree on what they send.
        """
        if not requires_sync and not self._accumulates:
            self._accumulates = True
            self._prepare_to_accumulate()
        for comms in self.unit_comms:
            comms.set_sync(requires_sync)

    def flush(self) -> None:
        """Send pending gradients across nodes now, for loops that do not know which micro-batch is the last:

            zpp.set_requires_cross_node_sync(False)  # once and for all
            for batch in some_micro_batches:
                model(batch).backward()
            zpp.flush()
            optimizer.step()

        `.grad` is then what it would be, bit for bit, after one more micro-batch with sync on whose gradients
        are zero: scaled, converted, added and shown to hooks by FSDP2 itself. Costs that micro-batch's
        communication, and the memory of one unit's gradients. Call it on every rank, after backward.
        """
        pending = [comms for comms in self.unit_comms if comms.has_pending]
        own = [comms.unit for comms in pending if comms.fsdp2_puts_off != "reduction"]
        if off := [unit.name for unit in own if not unit.reduces_gradients]:
            raise RuntimeError(
                f"flush() while FSDP2 reduces no gradients of {', '.join(off)}; call "
                "set_requires_gradient_sync(True) before the last backward"
            )
        for comms in reversed(pending):
            comms.flush()

    def release(self) -> None:
        """Give up node shards and scratch, without `remove()`: while the model sleeps, or is offloaded.

        The next gather of each unit sends its weights across nodes and fills them again; with weights as
        differences the reference is gone, too, so that is a full send. Kept errors of error feedback stay:
        nothing could bring them back. Pending gradients are refused. The memory goes to torch's allocator;
        `torch.accelerator.memory.empty_cache()` gives it to the device. Call it on every rank.
        """
        self._raise_if_pending()
        for _, all_gather, _ in self._installed():
            all_gather.release()
        self._scratch.release()

    def drop_pending_gradients(self) -> None:
        """Forget gradients accumulated without cross-node sync. `zero_grad()` does it by itself."""
        for comms in self.unit_comms:
            comms.drop_pending()

    def gradients_zeroed(self, params: set[int]) -> None:
        """zero_grad() ran for the parameters with these ids: what is pending for them goes, too."""
        for comms in self.unit_comms:
            if comms.has_pending and comms.gradients.zeroed(params):
                comms.drop_pending()

    def remove(self) -> None:
        """Give the model back to FSDP2's own comms. Doing it twice is harmless."""
        self._raise_if_pending()
        self._alarm.raise_if_any()
        for comms in self.unit_comms:
            comms.remove()
        self._remove_hooks()

    def _raise_if_pending(self) -> None:
        pending = [comms.unit.name for comms in self.unit_comms if comms.has_pending]
        if pending:
            raise RuntimeError(
                f"gradients of {', '.join(pending)} are still pending without cross-node sync; run the last "
                "micro-batch with set_requires_cross_node_sync(True), or call flush() or "
                "drop_pending_gradients()"
            )

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _install(self) -> None:
        for comms, all_gather, reduce_scatter in self._installed():
            all_gather.belong_to(self)
            comms.unit.install(all_gather, reduce_scatter)
            self._handles += comms.unit.on_load(all_gather.invalidate)
            if reduce_scatter.feedback is not None:
                self._handles += comms.unit.on_load(reduce_scatter.feedback.reset)
                comms.unit.send_unused_gradients()  # kept errors need one layout in every step
        self._steps = OptimizerSteps(self.unit_comms, self._alarm)
        self._handles += self._steps.register()

    def _installed(self) -> Iterator[tuple[UnitComms, AllGather, ReduceScatter]]:
        return ((comms, *comms.pair) for comms in self.unit_comms if comms.pair is not None)

    def _prepare_to_accumulate(self) -> None:
        listen(self)
        self._warn_if_large(sum((comms.will_keep() for comms in self.unit_comms), Kept()))
        for comms in self.unit_comms:
            comms.prepare_to_accumulate()

    def _warn_if_large(self, kept: Kept) -> None:
        """Say so, before it is allocated."""
        shards = sum(comms.unit.shard_bytes for comms in self.unit_comms)
        if kept.total > shards and dist.get_rank() == 0:
            logger.warning(
                "zeropp: will keep more on every rank than its shards of the parameters, %s bytes: "
                "%s. summary() has it by unit; Config(secondary=False) saves node shards, "
                "gradients_pending='bf16' half of pending gradients, error_feedback=False kept errors",
                *(f"{shards:,}", kept.describe()),
            )


def apply(
    model: nn.Module, config: Config | None = None, *, overrides: Mapping[str, Config] | None = None
) -> ZeroPP:
    """Replace what FSDP2 sends for `model` by ZeRO++. Works in place; call it on every rank.

    Args:
        model: a module that `fully_shard` has been applied to, in whatever way.
        config: what to send; the default is `Config()`.
        overrides: other Configs for units whose name matches a pattern (as in a shell: `layers.*`); the
            first pattern that matches counts.

    Applying the same again returns the same `ZeroPP`; applying something else replaces it. After FSDP2's
    `set_separate_reduce_scatter_group`, apply again: process groups for hops are made here.
    """
    config = Config() if config is None else config
    overrides = dict(overrides or {})
    _check_configs(config, overrides)
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialized; call torch.distributed.init_process_group() and "
            "fully_shard() before zeropp.apply()"
        )
    units = find_units(model)
    if not units:
        raise ValueError(
            f"{type(model).__name__} has no parameters sharded by FSDP2; call "
            "torch.distributed.fsdp.fully_shard() on its blocks and on itself before zeropp.apply()"
        )
    previous = _previous(units)
    same = previous is not None and (previous.config, previous.overrides) == (config, overrides)
    if previous is not None and same and all(comms.has_its_groups for comms in previous.unit_comms):
        return previous
    # Everything that can fail comes before the first change to the model.
    ledger, scratch, alarm = Ledger(), Scratch(), Alarm()
    chosen = choose_configs(units, config, overrides)
    unit_comms = [decide_comms(unit, chosen[unit], ledger, scratch, alarm) for unit in units]
    if previous is not None:
        previous.remove()
    zpp = ZeroPP(config, overrides, unit_comms, ledger, scratch, alarm)
    zpp._install()
    _log(zpp)
    zpp._warn_if_large(sum((replace(comms.will_keep(), pending=0) for comms in unit_comms), Kept()))
    return zpp


def _check_configs(config: Config, overrides: Mapping[str, Config]) -> None:
    given = {"config": config, **{f"overrides[{key!r}]": value for key, value in overrides.items()}}
    for where, value in given.items():
        if not isinstance(value, Config):
            raise TypeError(f"{where} is {value!r}; expected a zeropp.Config")


def _previous(units: list[Unit]) -> ZeroPP | None:
    """The ZeroPP that these units are under; it must be of exactly these units."""
    owners = {id(comm.owner): comm.owner for unit in units if (comm := unit.installed()) is not None}
    for owner in owners.values():
        theirs = [comms.unit for comms in owner.unit_comms]
        same = len(theirs) == len(units) and all(unit.shares_parameters_with(theirs) for unit in units)
        if not same:
            raise ValueError(
                "zeropp is already applied to another module that shares units with this one (its units: "
                f"{', '.join(unit.name for unit in theirs)}); call remove() on what that apply() returned"
            )
    return next(iter(owners.values()), None)


def _log(zpp: ZeroPP) -> None:
    """The first rank of each unit's group says what became of the unit."""
    for comms in zpp.unit_comms:
        row, group = comms.describe(), comms.unit.group
        if group is not None and group.rank() != 0:
            continue
        if comms.left_alone:
            logger.warning("zeropp: unit %(unit)s %(notes)s", row)
        else:
            logger.info(
                "zeropp: unit %(unit)s, %(nodes)s: weights %(weights)s, gradients %(gradients)s. %(notes)s",
                row,
            )
