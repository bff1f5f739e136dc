"""Process groups for hops, created by their members only. The only file with private names of
torch.distributed.

[Note: Names of groups]
Members of a new group find each other in the job's store, under the name of the group. With
use_local_synchronization, the only way to call `new_group` on members alone, the name contains the number of
groups that this rank has created (torch 2.13: `len(pg_names)`, 2.14 and 2.15: `group_count`; PyTorch issues
189073 and 190431). Ranks with different numbers look under different names, and wait until the timeout. A
sub-group of a 2-D mesh cannot make the other ranks of the job create a group. So zeropp chooses the name: the
purpose of the group and its members. A group is created once and then shared, so no name is used twice.

[Note: No split of the world]
With `init_process_group(device_id=...)`, torch creates NCCL groups by a split of the world's communicator,
which waits for every rank of the job. So zeropp hides the device while it creates a group: the group connects
through the store at its first use, as in jobs without `device_id`. (Read in the sources, and run with gloo on
torch 2.15, which accepts a device, too; never run with NCCL.)

[Note: Priority]
FSDP2's own collectives run on its high-priority streams, because NCCL uses the current stream for synchronous
calls. zeropp's calls are asynchronous, so that one chunk is encoded while another is sent. NCCL then uses a
stream of the group, which has high priority only on request. (Never run.) A layout with a single hop uses
FSDP2's group and its priority.

[Note: One device]
A gloo group has a device: a thread that sends and receives, and that wakes up a hundred times a second even
if nothing arrives. On a CPU there are two groups for each direction (cpu/comm_threads.py), so four threads
would interrupt computation. So groups made here share the devices of the job's own group. torch passes no
options to gloo. So while a group is created, a subclass that adds them replaces `ProcessGroupGloo`. (Its
arguments depend on the version of torch: 2.15 adds one option.)

There is no public way to choose a name, to avoid the split, or to share a device, nor, in torch 2.13, to
change a timeout. The used parts of `_world` and `_new_process_group_helper` are the same in torch 2.13, 2.14
and 2.15.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup

# The key is the default group, so entries do not outlive `destroy_process_group`.
_made: WeakKeyDictionary[ProcessGroup, dict[str, ProcessGroup]] = WeakKeyDictionary()


def world() -> ProcessGroup:
    """Return the default group."""
    group = dist.group.WORLD
    assert group is not None
    return group


def job_store() -> Store:
    """Return the store in which the ranks of the job find each other."""
    return c10d._get_default_store()


def group_of(ranks: Sequence[int], purpose: str) -> ProcessGroup:
    """Return the group of these global ranks for this purpose. These ranks, and no others, must call it.

    The first call creates the group, with the backend and the timeout of the job.
    """
    everyone, ranks = world(), sorted(ranks)
    made = _made.setdefault(everyone, {})
    name = f"{purpose}_{hashlib.sha1(str(ranks).encode(), usedforsecurity=False).hexdigest()}"
    if name not in made:
        backend, store = c10d._world.pg_map[everyone]
        timeout = timeout_of(everyone)
        with _no_device(everyone), _devices_of(everyone):
            made[name], _ = c10d._new_process_group_helper(
                len(ranks),
                ranks.index(dist.get_rank()),
                ranks,
                backend,
                store,
                c10d.GroupName(name),
                backend_options=_options(dist.get_backend_config(everyone), timeout),
                timeout=timeout,
                group_desc=purpose,
            )
        # `new_group` registers the ranks, too; the helper does not.
        c10d._world.pg_group_ranks[made[name]] = {rank: place for place, rank in enumerate(ranks)}
    return made[name]


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set how long this rank waits in collectives of the group from now on."""
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(timeout)


@contextmanager
def _no_device(everyone: ProcessGroup) -> Iterator[None]:
    """Hide the device of the default group; see [Note: No split of the world]."""
    device = everyone.bound_device_id
    everyone.bound_device_id = None
    try:
        yield
    finally:
        everyone.bound_device_id = device


@contextmanager
def _devices_of(everyone: ProcessGroup) -> Iterator[None]:
    """Let new gloo groups share the devices of `everyone`; see [Note: One device]. No effect without gloo."""
    gloo: Any = getattr(c10d, "ProcessGroupGloo", None)
    known = [getattr(everyone._get_backend(device), "options", None) for device in everyone._device_types]
    # With several backends (cpu:gloo,cuda:nccl), only gloo's options have devices.
    shared = [options for options in known if gloo is not None and isinstance(options, gloo._Options)]
    if not shared:
        yield
        return

    class OnSharedDevices(gloo):  # type: ignore[misc]  # chosen at runtime
        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
            options = gloo._Options()
            options._devices, options._threads = shared[0]._devices, shared[0]._threads
            options._timeout = timeout
            for name, value in others.items():  # enable_reconfigure, from torch 2.15 on
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OnSharedDevices  # type: ignore[misc]
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = gloo  # type: ignore[misc]


def _options(backends: str, timeout: timedelta) -> Any:
    """Return options with high priority for NCCL, or None; see [Note: Priority]."""
    if "nccl" not in backends:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return how long ranks wait in the group: the timeout of `init_process_group`, unless it was changed."""
    backend = group._get_backend(group._device_types[0])
    options = getattr(backend, "options", None)
    return getattr(options, "_timeout", None) or c10d._get_default_timeout(dist.get_backend(group))
