"""`ZeroPP`, which `apply` returns: what every unit sends, and what happens to the model meanwhile.

[Note: What tells us that weights changed]
Optimizer steps: torch's global step hooks, see fsdp2/optimizer_hooks.py; only units with a parameter in that
optimizer count, and of those only what it can change, so frozen units are sent once and never again.
State-dict loads: a hook on every module that owns a parameter of the unit. In-place operations on a
parameter: its version, see [Note: Operations on parameters] in fsdp2/units.py. Anything else:
`ZeroPP.invalidate()`.

[Note: Lifetime]
FSDP2 holds our comms, our comms hold their `ZeroPP` (as `owner`), torch's global hooks hold it only weakly.
When the model goes, everything goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ._auto import Search, after_backward
from ._describe import describe, summary_table, warn_if_unusual
from ._footprint import Footprint
from ._saved_state import is_usable, load_units, save_units
from ._unit import CommPair, CompressedUnit, ModelContext, choose_configs
from .comm.ledger import render
from .comm.reduce_scatter import GradientSync
from .config import Config
from .fsdp2.gradient_sync import on_gradient_sync
from .fsdp2.optimizer_hooks import OptimizerSteps
from .fsdp2.zero_grad import listen


class ZeroPP:
    """zeropp on one model. Made by `apply`."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        overrides: Mapping[str, Config],
        unit_comms: list[CompressedUnit],
        context: ModelContext,
        search: Search | None = None,
    ) -> None:
        self.config = config
        self.overrides = dict(overrides)
        self.unit_comms = unit_comms
        self.ledger = context.ledger
        """What this rank sent, per unit, collective and hop."""
        self.search = search
        """How `config` is found, or was, after `apply(model, "auto")`; None: somebody has given it."""
        self._context = context
        weakref.finalize(self, context.alarm.log_if_known)
        self._model = model
        self._handles: list[Any] = []
        self._followed: list[Any] = []
        self._accumulates = False
        self._timeout: timedelta | None = None

    def summary(self) -> str:
        """What every unit sends, and how, or why it was left alone; as text.

        Bytes on this rank: "kept bytes" are what it keeps of the unit now, "will keep" what it keeps after a
        step, and "pending" what comes on top in one that accumulates without cross-node sync. Scratch, which
        all units share, is not in it: see `communication_bytes`.
        """
        self._context.alarm.raise_if_any()
        return render(summary_table(self.unit_comms)) + ("" if self.search is None else self.search.table())

    def report(self, path: str | Path) -> None:
        """Write a page, one HTML file: what this rank has sent, per unit and hop, over which nodes, and what
        16-bit FSDP2 would have sent. Not a collective: any rank may write its own."""
        # The one door from the library to its tools: a training job does not import the page.
        from .tools.atomic_files import write_file
        from .tools.pages.traffic import render_traffic

        topologies = [comms.topology for comms in self.unit_comms]
        units = [describe(comms) for comms in self.unit_comms]
        write_file(Path(path), render_traffic(self.ledger, topologies, units, dist.get_rank()))

    @property
    def communication_bytes(self) -> int:
        """Memory that zeropp keeps on this rank: node shards, pending gradients, kept errors, scratch, and
        gradients on their way."""
        shared = self._context.scratch.nbytes + self._context.late.nbytes
        return shared + sum(comms.keeps().total for comms in self.unit_comms)

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
        errors, the count of reductions for rounding at random; or what "auto" has chosen. Then a checkpoint
        must hold `state_dict()`."""
        return self.search is not None or any(comms.has_history for comms in self.unit_comms)

    def invalidate(self) -> None:
        """Say that weights were changed by other means than an optimizer step or `load_state_dict`.

        The next gather of every unit sends the weights across nodes again. Call it on every rank.
        """
        for comms in self.unit_comms:
            comms.invalidate()

    def set_config(self, config: Config, *, overrides: Mapping[str, Config] | None = None) -> None:
        """Go on with another Config, between two steps; call it on every rank.

            zpp = zeropp.apply(model, zeropp.Config(gradients_in_node="bf16", gradients_across="bf16"))
            for step in range(steps):
                if step == 100:
                    zpp.set_config(zeropp.Config())

        The ledger goes on counting. Node shards, references of differences and kept errors stay if they mean
        the same under the new Config; else the weights are sent anew, and kept errors start at zero. The
        search of "auto" is over.
        """
        self._switch(config, dict(overrides or {}), None)

    def _switch(self, config: Config, overrides: Mapping[str, Config], search: Search | None) -> None:
        self._raise_if_pending()
        if not self._handles:
            raise RuntimeError("set_config after remove(); call zeropp.apply(model, config)")
        # Everything that can fail comes before the first change.
        chosen = choose_configs([comms.unit for comms in self.unit_comms], config, overrides)
        unit_comms = [
            CompressedUnit(unit, own, self._context, may_hold=search is None) for unit, own in chosen.items()
        ]
        for old, new in zip(self.unit_comms, unit_comms, strict=True):
            old.forget_unused()
            if old.pair is not None and new.pair is not None:
                new.pair.take_over(old.pair)
        self._remove_hooks()
        self._context.remove_overlap()
        for old, new in zip(self.unit_comms, unit_comms, strict=True):
            sync = old.gradients.sync
            if sync is not GradientSync.ACROSS:
                old.set_sync(
                    GradientSync.ACROSS
                )  # restores FSDP2's switches, which the new Config may not use
                new.set_sync(sync)
        self.config, self.overrides, self.unit_comms = config, dict(overrides), unit_comms
        self.search = search
        self.install()
        if self._accumulates and search is None:  # a search has warned for all that it tries
            warn_if_unusual(unit_comms, self._will_keep)

    def _after_step(self, optimizer: Optimizer) -> None:
        """An optimizer of this model has stepped: the search for a Config goes on."""
        search = self.search
        if search is not None and not (search.chosen and search.config == self.config):
            after_backward(partial(self._search_on, search, optimizer))

    def _search_on(self, search: Search, optimizer: Optimizer) -> None:
        if search.config == self.config:
            search.after_step(optimizer)
        self._follow_search()

    def _follow_search(self) -> None:
        """Go on with the Config of the search, as soon as no gradients wait, on all ranks alike: those of
        another optimizer may."""
        search = self.search
        waits = any(comms.has_pending for comms in self.unit_comms)
        if search is not None and search.config != self.config and not waits:
            self._context.scratch.release()  # of the size that the last one needed
            self._switch(search.config, {}, search)

    def state_dict(self) -> dict[str, Any]:
        """What this rank must save for a run that goes on bit for bit: references of weight differences, kept
        errors, the count of reductions that stochastic rounding depends on, and what "auto" has chosen. Only
        tensors, numbers and names, and copies: they do not change with the next step.

        Every rank saves its own, beside the model and the optimizer; `torch.load` with `weights_only=True`
        reads it.
        """
        self._context.alarm.raise_if_any()
        for comms in self.unit_comms:
            comms.forget_unused()
        state = save_units(self.unit_comms)
        if self.search is not None:
            state["auto"] = self.search.state_dict()
        return dict(state)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> bool:
        """Go on from what `state_dict` of this rank returned. Call it on every rank, after loading the model:
        loading weights forgets all that is kept. Its tensors may be on any device.

        A rank that has none passes None. If any has none, or one of another number of ranks, all go on
        without: the weights are sent anew, kept errors start at zero, and a warning says so. If "auto" had
        chosen a Config, it is not searched again. Returns whether the state is used, on every rank the same.
        """
        used = is_usable(self.unit_comms, state)
        usable = state if used and state is not None else {}
        if self.search is not None:
            self.search.load_state_dict(usable.get("auto", {}))
            self._follow_search()
        load_units(self.unit_comms, usable.get("units", {}))
        return used

    def set_requires_cross_node_sync(self, requires_sync: bool) -> None:
        """Turn cross-node gradient traffic off for all but the last micro-batch of a step.

        Does the right thing for any Config and mesh. While off: on two hops, gradients are reduced inside the
        node only and add up there in fp32. On a flat route nothing is reduced, and FSDP2 keeps full gradients
        (its `set_requires_gradient_sync`), unless "auto" has chosen it, which has no memory for that: then
        every micro-batch is reduced. With HSDP that shards inside each node, FSDP2 leaves out the
        all-reduce (`set_requires_all_reduce`). Turn it on again before the last micro-batch's backward; an
        optimizer step with gradients still pending is an error.

            for i, batch in enumerate(micro_batches):
                zpp.set_requires_cross_node_sync(i == len(micro_batches) - 1)
                model(batch).backward()
            optimizer.step()

        `zero_grad()` of the model or its optimizers drops pending gradients with the rest. A hook that takes
        `.grad` in backward gets zeros while sync is off, and all of it in the end; between two backwards
        `.grad` must stay: see [Note: Dropped or taken]. In a step with sync off in some micro-batch, a
        parameter that gets no gradient has gradient zero instead of None (as with FSDP2's
        `set_reduce_scatter_unused_params`): all micro-batches must agree on what they send. In other steps
        it is None, as with FSDP2.
        """
        if not requires_sync:
            self._accumulate()
        for comms in self.unit_comms:
            comms.set_sync(GradientSync.ACROSS if requires_sync else GradientSync.DEFERRED)

    def follow_no_sync(self) -> None:
        """From now on `set_requires_gradient_sync` of FSDP2 means `set_requires_cross_node_sync`, so a loop
        that has `no_sync` needs no other line:

            zpp = zeropp.apply(model, zeropp.Config())
            zpp.follow_no_sync()
            for i, batch in enumerate(micro_batches):
                model.set_requires_gradient_sync(i == len(micro_batches) - 1)
                model(batch).backward()

        Without it, FSDP2's switch stays what it is: while it is off nothing is reduced, not even inside the
        node, and every rank holds the gradients of the whole model. On a flat route it still is. The ledger
        then counts no reduction of 16-bit FSDP2 for micro-batches without sync: that loop has none. Ends with
        `remove()`.
        """
        if not self._handles:
            raise RuntimeError("follow_no_sync after remove(); call zeropp.apply(model, config)")
        if not self._followed:
            self._followed = on_gradient_sync(self._model, self._set_gradient_sync)
            for comms in self.unit_comms:
                if not comms.unit.reduces_gradients:  # switched off before: from now on by zeropp
                    comms.unit.set_requires_gradient_sync(True)
                    self._set_gradient_sync(set(comms.unit.modules), False)

    def _set_gradient_sync(self, modules: set[nn.Module], requires_sync: bool) -> None:
        """What FSDP2 was told of these modules."""
        if not requires_sync:
            self._accumulate()
        for comms in self.unit_comms:
            if not modules.isdisjoint(comms.unit.modules):
                comms.set_sync(GradientSync.ACROSS if requires_sync else GradientSync.DEFERRED_BY_NO_SYNC)

    def _accumulate(self) -> None:
        if not self._accumulates:
            self._accumulates = True
            warn_if_unusual(self.unit_comms, self._will_keep if self.search is None else self.search.kept)

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
        own = [comms.unit for comms in pending if comms.fsdp2_defers != "reduction"]
        if off := [unit.name for unit in own if not unit.reduces_gradients]:
            raise RuntimeError(
                f"flush() while FSDP2 reduces no gradients of {', '.join(off)}; call "
                "set_requires_gradient_sync(True) before the last backward"
            )
        for comms in reversed(pending):
            comms.flush()

    @contextmanager
    def exact_weights(self) -> Iterator[None]:
        """Inside, weights are gathered as they are, by FSDP2's own collective: for an evaluation of the model
        that a checkpoint would hold, to the last bit. Training computes with decoded weights (int8, by
        default), and so does an evaluation without this. Enter it on every rank."""
        installed = [
            (comms.unit, comms.pair.all_gather) for comms in self.unit_comms if comms.pair is not None
        ]
        before = [all_gather.is_exact for _, all_gather in installed]
        for unit, all_gather in installed:
            unit.drop_gathered()
            all_gather.is_exact = True
        try:
            yield
        finally:
            for (unit, all_gather), was_exact in zip(installed, before, strict=True):
                unit.drop_gathered()
                all_gather.is_exact = was_exact

    def release(self) -> None:
        """Give up node shards and scratch, without `remove()`: while the model sleeps, or is offloaded.

        The next gather of each unit sends its weights across nodes and fills them again; with weights as
        differences the reference is gone, too, so that is a full send. Kept errors of error feedback stay:
        nothing could bring them back. Pending gradients are refused. The memory goes to torch's allocator;
        `torch.accelerator.memory.empty_cache()` gives it to the device. Call it on every rank.
        """
        self._raise_if_pending()
        for pair in self._pairs:
            pair.all_gather.release()
        self._context.scratch.release()

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long hops wait for other ranks; at first, it is what init_process_group was given. For
        loops that change it for their own process groups. Call it on every rank, after a barrier."""
        self._timeout = timeout
        for pair in self._pairs:
            for hop in (*pair.all_gather.hops, *pair.reduce_scatter.hops):
                hop.set_timeout(timeout)

    def drop_pending_gradients(self) -> None:
        """Forget gradients accumulated without cross-node sync. `zero_grad()` does it by itself."""
        for comms in self.unit_comms:
            comms.drop_pending()

    def gradients_zeroed(self, params: set[int]) -> None:
        """zero_grad() ran for the parameters with these ids: what is pending for them goes, too."""
        self._context.late.abandon_failed()
        for comms in self.unit_comms:
            if comms.has_pending and comms.gradients.zeroed(params):
                comms.drop_pending()

    def remove(self) -> None:
        """Give the model back to FSDP2's own comms. Doing it twice is harmless."""
        self._raise_if_pending()
        self._context.alarm.raise_if_any()
        self._context.remove_overlap()
        for comms in self.unit_comms:
            comms.remove()
        self._remove_hooks()
        for instead in self._followed:
            instead.remove()
        self._followed = []

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

    def install(self) -> None:
        """Put the comms in place. Called by `apply`."""
        listen(self)
        for comms in self.unit_comms:
            self._handles += comms.install(self)
        if self._timeout is not None:
            self.set_timeout(self._timeout)
        then = None if self.search is None else self._after_step
        compressed = [comms for comms in self.unit_comms if comms.pair is not None]
        self._steps = OptimizerSteps(compressed, self._context.alarm, then)
        self._handles += self._steps.register()

    @property
    def _pairs(self) -> list[CommPair]:
        return [comms.pair for comms in self.unit_comms if comms.pair is not None]

    @property
    def _will_keep(self) -> Footprint:
        return sum((comms.will_keep() for comms in self.unit_comms), Footprint())
