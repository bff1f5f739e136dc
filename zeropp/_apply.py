"""`apply`: install zeropp on all units of a model, or raise and change none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch.distributed as dist
from torch import nn

from ._auto import Search, find_candidates, is_logging_rank
from ._describe import describe, warn_if_unusual
from ._footprint import Footprint
from ._handle import ZeroPP
from ._text import count, some
from ._unit import CompressedUnit, ModelContext, check_configs, choose_configs
from .config import Config
from .fsdp2.units import Unit, find_units

logger = logging.getLogger("zeropp")


def apply(
    model: nn.Module,
    config: Config | Literal["auto"] | None = None,
    *,
    overrides: Mapping[str, Config] | None = None,
) -> ZeroPP:
    """Replace the communication of an FSDP2 model with ZeRO++, in place. Call it on every rank.

    Args:
        model: a module with parameters sharded by `fully_shard`.
        config: the Config of all units; the default is `Config()`. "auto" tries several Configs in the first
            steps, including plain FSDP2, and keeps the fastest: see _auto.py.
        overrides: other Configs for units whose name matches a shell pattern (`layers.*`). The first pattern
            that matches counts.

    Returns:
        The `ZeroPP` of the model. A second call with the same arguments returns the same object; other
        arguments replace it. Call `apply` again after FSDP2's `set_separate_reduce_scatter_group`, because
        `apply` creates the process groups of hops.

    Examples:
        On one rank, which sends nothing; a training job starts its ranks with torchrun.

        >>> import torch, zeropp
        >>> from torch.distributed.fsdp import fully_shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        >>> for layer in model:
        ...     _ = fully_shard(layer, mesh=mesh)
        >>> _ = fully_shard(model, mesh=mesh)
        >>> zpp = zeropp.apply(model, zeropp.Config())
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> [comms.unit.name for comms in zpp.unit_comms], zpp.nodes
        (['0', '1'], 1)
        >>> zpp.remove()
        >>> dist.destroy_process_group()
    """
    overrides = dict(overrides or {})
    _check(config, overrides)
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
    if previous is not None and _is_same(previous, config, overrides):
        return previous
    # All errors are raised before the first change to the model.
    context = ModelContext.new()
    search = Search(find_candidates(units, context), units) if config == "auto" else None
    config = search.config if search is not None else config if isinstance(config, Config) else Config()
    chosen = choose_configs(units, config, overrides)
    unit_comms = [CompressedUnit(unit, chosen[unit], context, may_hold=search is None) for unit in units]
    if previous is not None:
        previous.remove()  # raises if gradients are pending
    context.ledger.left_alone = {
        comms.unit.name: sum(p.numel() for p in comms.unit.params)
        for comms in unit_comms
        if comms.left_alone and comms.unit.sends
    }
    zpp = ZeroPP(model, config, overrides, unit_comms, context, search)
    zpp.install()
    _log(zpp)
    if search is not None and is_logging_rank(units):
        logger.info("zeropp: %s", search.describe())
    kept = sum((comms.will_keep() for comms in unit_comms), Footprint()) if search is None else search.kept
    warn_if_unusual(unit_comms, replace(kept, pending=0))  # ZeroPP warns of these at first use
    return zpp


def _check(config: Config | str | None, overrides: Mapping[str, Config]) -> None:
    """Raise unless the arguments of `apply` are valid."""
    if not (config is None or config == "auto" or isinstance(config, Config)):
        raise TypeError(f"config is {config!r}; expected a zeropp.Config or 'auto'")
    if config == "auto" and overrides:
        raise ValueError(
            f"overrides has {sorted(overrides)} with config='auto', which tries plain FSDP2 and others "
            "on the whole model; give a zeropp.Config, or no overrides"
        )
    check_configs(config if isinstance(config, Config) else Config(), overrides)


def _is_same(previous: ZeroPP, config: Config | str | None, overrides: Mapping[str, Config]) -> bool:
    """Whether `previous` has these arguments, and FSDP2 has not changed its process groups since."""
    if config == "auto":
        same = previous.search is not None
    else:
        given = (Config() if config is None else config, overrides)
        same = previous.search is None and (previous.config, previous.overrides) == given
    return same and all(comms.has_current_groups for comms in previous.unit_comms)


def _previous(units: list[Unit]) -> ZeroPP | None:
    """Return the ZeroPP of these units, or None. Raise if it has other units, too, or only some of them."""
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
    """Log the communication of each unit, on the first rank of its group: one line for all equal units."""
    alike: dict[tuple[int, str], list[str]] = {}
    for comms in zpp.unit_comms:
        row, group = describe(comms), comms.unit.group
        if group is not None and group.rank() != 0:
            continue
        level, became = logging.WARNING, row["notes"]
        if not comms.left_alone:
            level = logging.INFO
            became = "{nodes}: weights {weights}, gradients {gradients}. {notes}".format(**row).rstrip()
        alike.setdefault((level, became), []).append(row["unit"])
    for (level, became), names in alike.items():
        logger.log(level, "zeropp: %s, %s: %s", count(len(names), "unit"), some(names), became)
    if dist.get_rank() == 0 and _has_nothing_to_shrink(zpp):
        logger.warning(
            "zeropp: all ranks are on one node: nothing crosses nodes, which is what zeropp makes smaller. "
            "If that is not so, say how many ranks a node has: Config(node_size=...)"
        )


def _has_nothing_to_shrink(zpp: ZeroPP) -> bool:
    """Whether a unit has two hops configured, and all units are on one node. HSDP that shards inside each
    node is on one node by design, so its units do not count."""
    ours = [comms for comms in zpp.unit_comms if comms.pair is not None and not comms.unit.is_hsdp]
    asked = any(comms.config.route == "two-hop" for comms in ours)
    return asked and all(comms.topology is not None and comms.topology.is_one_node for comms in ours)
