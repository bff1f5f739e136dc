"""`ZeroPP`, which `apply` returns: the user's interface to the compressed units of one model.

[Note: Detection of changed weights]
Optimizer steps: torch's global step hooks (fsdp2/optimizer_hooks.py). Only parameters that the optimizer can
change count, so frozen units are sent once.
State-dict loads: a hook on every module that owns a parameter of the unit.
In-place operations on a parameter: its version, see [Note: Operations on parameters] in fsdp2/units.py.
All other changes: the user calls `ZeroPP.invalidate()`.

[Note: Lifetime]
FSDP2 holds zeropp's comms, and the comms hold their `ZeroPP` (as `owner`). torch's global hooks hold it only
weakly. All of these are freed with the model.
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
    """zeropp on one model. Created by `apply`."""

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
        """Traffic of this rank per unit, collective and hop."""
        self.search = search
        """The search for `config` after `apply(model, "auto")`; None: the user chose `config`."""
        self._context = context
        weakref.finalize(self, context.alarm.log_if_known)  # an error that no later call would raise
        self._model = model
        self._handles: list[Any] = []
        self._followed: list[Any] = []
        self._accumulates = False
        self._timeout: timedelta | None = None

    def summary(self) -> str:
        """Return a table of the units as text: hops and codecs of each unit, or why it was left alone.

        Bytes on this rank: "kept bytes" now, "will keep" after a step, and "pending" in a step that
        accumulates without cross-node sync. Scratch, shared by all units, is in `communication_bytes` only.
        """
        self._context.alarm.raise_if_any()
        return render(summary_table(self.unit_comms)) + ("" if self.search is None else self.search.table())

    def report(self, path: str | Path) -> None:
        """Write the traffic of this rank to one HTML file: bytes per unit, hop and node, and the bytes of
        16-bit FSDP2. Not a collective: any rank may write its own file."""
        # The library's only import of its tools. Lazy: a training job does not need them.
        from .tools.atomic_files import write_file
        from .tools.pages.traffic import render_traffic

        topologies = [comms.topology for comms in self.unit_comms]
        units = [describe(comms) for comms in self.unit_comms]
        write_file(Path(path), render_traffic(self.ledger, topologies, units, dist.get_rank()))

    @property
    def communication_bytes(self) -> int:
        """Bytes of memory that zeropp holds on this rank: node shards, pending gradients, stored errors,
        scratch, and gradients on their way."""
        shared = self._context.scratch.nbytes + self._context.late.nbytes
        return shared + sum(comms.keeps().total for comms in self.unit_comms)

    @property
    def node_shard_bytes(self) -> int:
        """Bytes of node shards in `communication_bytes`: the cost of `Config.secondary`."""
        return sum(comms.keeps().node_shard for comms in self.unit_comms)

    @property
    def nodes(self) -> int:
        """Number of nodes that the units are sharded over; 1 for HSDP that shards inside each node."""
        topologies = (comms.topology for comms in self.unit_comms)
        return max((len(topology.nodes) for topology in topologies if topology is not None), default=1)

    @property
    def has_history(self) -> bool:
        """Whether zeropp has state that cannot be rebuilt from the weights: references of weight differences,
        stored errors, counts of reductions for stochastic rounding, or the choice of "auto". A checkpoint
        must then hold `state_dict()`."""
        return self.search is not None or any(comms.has_history for comms in self.unit_comms)

    def invalidate(self) -> None:
        """Declare the weights changed by other means than an optimizer step or `load_state_dict`.

        The next gather of every unit sends the weights across nodes again. Call it on every rank.
        """
        for comms in self.unit_comms:
            comms.invalidate()

    def set_config(self, config: Config, *, overrides: Mapping[str, Config] | None = None) -> None:
        """Replace the Config between two steps. Call it on every rank.

            zpp = zeropp.apply(model, zeropp.Config(gradients_in_node="bf16", gradients_across="bf16"))
            for step in range(steps):
                if step == 100:
                    zpp.set_config(zeropp.Config())

        The ledger continues to count. Node shards, references of differences and stored errors stay if they
        mean the same under the new Config. Otherwise the weights are sent again, and stored errors start at
        zero. A search of "auto" ends.
        """
        self._switch(config, dict(overrides or {}), None)

    def _switch(self, config: Config, overrides: Mapping[str, Config], search: Search | None) -> None:
        """Replace the comms of all units. The order of statements matters: first all that can fail, then the
        state moves to the new comms, then the old hooks and switches are removed, then the new ones are
        installed."""
        self._raise_if_pending()
        if not self._handles:
            raise RuntimeError("set_config after remove(); call zeropp.apply(model, config)")
        # All errors are raised before the first change.
        chosen = choose_configs([comms.unit for comms in self.unit_comms], config, overrides)
        unit_comms = [
            CompressedUnit(unit, own, self._context, may_hold=search is None) for unit, own in chosen.items()
        ]
        for old, new in zip(self.unit_comms, unit_comms, strict=True):
            old.forget_unused()  # before `take_over`: an early gather has changed the node shard
            if old.pair is not None and new.pair is not None:
                new.pair.take_over(old.pair)
        self._remove_hooks()
        self._context.remove_overlap()
        for old, new in zip(self.unit_comms, unit_comms, strict=True):
            sync = old.gradients.sync
            if sync is not GradientSync.ACROSS:
                old.set_sync(GradientSync.ACROSS)  # restores FSDP2's switches: the new Config may use others
                new.set_sync(sync)
        self.config, self.overrides, self.unit_comms = config, dict(overrides), unit_comms
        self.search = search
        self.install()
        if self._accumulates and search is None:  # a search has warned of all candidates
            warn_if_unusual(unit_comms, self._will_keep)

    def _after_step(self, optimizer: Optimizer) -> None:
        """Continue the search for a Config after a step of an optimizer of this model."""
        search = self.search
        if search is not None and not (search.chosen and search.config == self.config):
            after_backward(partial(self._search_on, search, optimizer))

    def _search_on(self, search: Search, optimizer: Optimizer) -> None:
        # A step does not count while pending gradients delay the switch to the next visit's Config.
        if search.config == self.config:
            search.after_step(optimizer)
        self._follow_search()

    def _follow_search(self) -> None:
        """Install the Config of the search as soon as no gradients are pending. Gradients of another
        optimizer may be pending, on all ranks alike."""
        search = self.search
        waits = any(comms.has_pending for comms in self.unit_comms)
        if search is not None and search.config != self.config and not waits:
            self._context.scratch.release()  # its size was chosen for the last Config
            self._switch(search.config, {}, search)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank must save to resume bit for bit: references of weight differences,
        stored errors, the counts of reductions that stochastic rounding depends on, and the choice of "auto".

        It holds copies, which the next step does not change: tensors, numbers and names only, so `torch.load`
        with `weights_only=True` reads it. Every rank saves its own state next to the model and the optimizer.
        """
        self._context.alarm.raise_if_any()
        for comms in self.unit_comms:
            comms.forget_unused()
        state = save_units(self.unit_comms)
        if self.search is not None:
            state["auto"] = self.search.state_dict()
        return dict(state)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> bool:
        """Restore the state that `state_dict` of this rank returned. Call it on every rank.

        Call it after loading the model, because loading weights drops zeropp's state. The tensors may be on
        any device. A rank without a state passes None. If one rank cannot use its state (none, or of another
        number of ranks, Config or version), no rank uses its own, and a warning gives the reason. If "auto"
        had chosen a Config, the search does not run again. Returns whether the state is used, on every rank.
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

        Works with any Config and mesh. While it is off:

        - Two hops: gradients are reduced inside the node only and add up there in fp32.
        - Flat route: nothing is reduced, and FSDP2 keeps full gradients (`set_requires_gradient_sync`). If
          "auto" chose it, every micro-batch is reduced: full gradients may not fit into memory.
        - HSDP that shards inside each node: FSDP2 leaves out the all-reduce (`set_requires_all_reduce`).

        Turn it on again before the backward of the last micro-batch. An optimizer step with pending gradients
        is an error.

            for i, batch in enumerate(micro_batches):
                zpp.set_requires_cross_node_sync(i == len(micro_batches) - 1)
                model(batch).backward()
            optimizer.step()

        `zero_grad()` drops pending gradients, too. A hook that takes `.grad` in backward gets zeros while
        sync is off. Between two backwards `.grad` must stay ([Note: Dropped or taken] in fsdp2/zero_grad.py).
        In a step with sync off in some micro-batch, a parameter without a gradient gets zeros instead of
        None, as with FSDP2's `set_reduce_scatter_unused_params`.
        """
        if not requires_sync:
            self._accumulate()
        for comms in self.unit_comms:
            comms.set_sync(GradientSync.ACROSS if requires_sync else GradientSync.DEFERRED)

    def follow_no_sync(self) -> None:
        """Make FSDP2's `set_requires_gradient_sync` mean `set_requires_cross_node_sync` from now on. A loop
        with `no_sync` then needs no other line:

            zpp = zeropp.apply(model, zeropp.Config())
            zpp.follow_no_sync()
            for i, batch in enumerate(micro_batches):
                model.set_requires_gradient_sync(i == len(micro_batches) - 1)
                model(batch).backward()

        Without this call, and on a flat route, FSDP2's switch keeps its meaning: nothing is reduced, and
        every rank holds full gradients. The ledger counts no 16-bit FSDP2 for these micro-batches. Ends with
        `remove()`.
        """
        if not self._handles:
            raise RuntimeError("follow_no_sync after remove(); call zeropp.apply(model, config)")
        if not self._followed:
            self._followed = on_gradient_sync(self._model, self._set_gradient_sync)
            for comms in self.unit_comms:
                if not comms.unit.reduces_gradients:  # off already: zeropp takes over the switch
                    comms.unit.set_requires_gradient_sync(True)
                    self._set_gradient_sync(set(comms.unit.modules), False)

    def _set_gradient_sync(self, modules: set[nn.Module], requires_sync: bool) -> None:
        """Handle a call of FSDP2's `set_requires_gradient_sync` for these modules."""
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
        """Send pending gradients across nodes now. For loops that do not know which micro-batch is the last:

            zpp.set_requires_cross_node_sync(False)  # once and for all
            for batch in some_micro_batches:
                model(batch).backward()
            zpp.flush()
            optimizer.step()

        `.grad` equals, bit for bit, its value after one more micro-batch with sync on and zero gradients:
        FSDP2 scales, converts and adds the sums, and calls hooks. Costs the communication of that micro-batch
        and the memory of one unit's gradients. Call it on every rank, after backward.
        """
        pending = [comms for comms in self.unit_comms if comms.has_pending]
        own = [comms.unit for comms in pending if comms.fsdp2_defers != "reduction"]
        if off := [unit.name for unit in own if not unit.reduces_gradients]:
            raise RuntimeError(
                f"flush() while FSDP2 reduces no gradients of {', '.join(off)}; call "
                "set_requires_gradient_sync(True) before the last backward"
            )
        for comms in reversed(pending):  # the order of a backward
            comms.flush()

    @contextmanager
    def exact_weights(self) -> Iterator[None]:
        """Gather exact weights with FSDP2's own collective inside the `with` block.

        An evaluation in it uses the weights that a checkpoint holds, to the last bit; training computes with
        decoded weights (int8 by default). Enter it on every rank.
        """
        units = [comms for comms in self.unit_comms if comms.pair is not None]
        before = [comms.set_exact(True) for comms in units]
        try:
            yield
        finally:
            for comms, was_exact in zip(units, before, strict=True):
                comms.set_exact(was_exact)

    def release(self) -> None:
        """Free node shards and scratch without `remove()`, while the model sleeps or is offloaded.

        The next gather of each unit sends its weights across nodes and fills its node shard again. With
        weights="delta-int4" that is a full send, because the reference is freed, too. Errors of error
        feedback stay, because they cannot be rebuilt. Raises if gradients are pending. The memory returns to
        torch's allocator; `torch.accelerator.memory.empty_cache()` returns it to the device. Call it on every
        rank.
        """
        self._raise_if_pending()
        for pair in self._pairs:
            pair.all_gather.release()
        self._context.scratch.release()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long hops wait for other ranks; the default is the timeout of `init_process_group`.

        For loops that change the timeout of their own process groups. Call it on every rank, after a barrier.
        """
        self._timeout = timeout
        for pair in self._pairs:
            for hop in (*pair.all_gather.hops, *pair.reduce_scatter.hops):
                hop.set_timeout(timeout)

    def drop_pending_gradients(self) -> None:
        """Drop gradients accumulated without cross-node sync. `zero_grad()` calls it automatically."""
        for comms in self.unit_comms:
            comms.drop_pending()

    def gradients_zeroed(self, params: set[int]) -> None:
        """Drop pending gradients after zero_grad() ran for the parameters with these ids."""
        self._context.late.abandon_failed()
        for comms in self.unit_comms:
            if comms.has_pending and comms.gradients.zeroed(params):
                comms.drop_pending()

    def remove(self) -> None:
        """Restore FSDP2's own comms. A second call has no effect."""
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
        """Install the comms and the hooks. Called by `apply` and after a change of the Config."""
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
