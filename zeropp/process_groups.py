"""New process groups for hops, that only their members make. The only file with private names of
torch.distributed.

[Note: Names of groups]
Members of a new group find each other in the job's store, under the group's name. `new_group` counts: with
use_local_synchronization, the only way to call it on members alone, the name has in it how many groups this
rank has made (torch 2.13: `len(pg_names)`, 2.14 and 2.15: `group_count`; PyTorch issues 189073 and 190431).
Ranks that have made different numbers of groups look under different names, and wait until the timeout. A
sub-group of a 2-D mesh cannot ask the rest of the job to count along. So the name is ours: what the group is
for, and who its members are. A group is made once and then shared, so no name is used twice.

[Note: No split of the world]
With `init_process_group(device_id=...)`, torch makes new NCCL groups by splitting the world's communicator,
which waits for every rank of the job. We forget the device while a group is made: it connects through the
store at its first use, as in jobs without `device_id`. (Read in the sources, and run with gloo on torch 2.15,
which takes a device, too; never run with NCCL.)

[Note: Priority]
FSDP2's own collectives run on its high-priority streams: NCCL works on the current stream if a call is not
asynchronous. Ours are, so that one chunk is encoded while another is sent, and NCCL then works on a stream of
the group's own, which has high priority only if asked for. (Never run.) A layout with a single hop sends it
through FSDP2's group, with the priority that this has.

[Note: One device]
A gloo group comes with a device: a thread that sends and receives, and that wakes up a hundred times a second
even if nothing arrives. On a CPU there are two groups for each direction (cpu/comm_threads.py), and four
threads that interrupt computing. So the groups made here use the devices of the job's own group. torch passes
no options on to gloo, so while a group is made, it finds a class in gloo's place that adds them. (What it is
called with is not the same in every torch: from 2.15 on, there is one option more.)

There is no public way to give a name, or not to split, or to share a device, nor, in torch 2.13, to change a
timeout. What is used of `_world` and `_new_process_group_helper` is the same in torch 2.13, 2.14 and 2.15.
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

# Keyed on the default group, so that nothing outlives `destroy_process_group`.
_made: WeakKeyDictionary[ProcessGroup, dict[str, ProcessGroup]] = WeakKeyDictionary()


def world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def job_store() -> Store:
    """Where the ranks of the job find each other."""
    return c10d._get_default_store()


def group_of(ranks: Sequence[int], purpose: str) -> ProcessGroup:
    """The group of these global ranks for this purpose. Each of them, and nobody else, must call.

    Made at the first call, with the backend and the timeout of the job."""
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
        c10d._world.pg_group_ranks[made[name]] = {rank: place for place, rank in enumerate(ranks)}
    return made[name]


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Change how long this rank waits in collectives of the group from now on."""
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(timeout)


@contextmanager
def _no_device(everyone: ProcessGroup) -> Iterator[None]:
    """See [Note: No split of the world]."""
    device = everyone.bound_device_id
    everyone.bound_device_id = None
    try:
        yield
    finally:
        everyone.bound_device_id = device


@contextmanager
def _devices_of(everyone: ProcessGroup) -> Iterator[None]:
    """See [Note: One device]. Without gloo, nothing changes."""
    gloo: Any = getattr(c10d, "ProcessGroupGloo", None)
    known = [getattr(everyone._get_backend(device), "options", None) for device in everyone._device_types]
    shared = [options for options in known if gloo is not None and isinstance(options, gloo._Options)]
    if not shared:
        yield
        return

    class OnSharedDevices(gloo):  # type: ignore[misc]  # chosen at runtime
        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
            options = gloo._Options()
            options._devices, options._threads = shared[0]._devices, shared[0]._threads
            options._timeout = timeout
            for name, value in others.items():  # enable_reconfigure
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OnSharedDevices  # type: ignore[misc]
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = gloo  # type: ignore[misc]


def _options(backends: str, timeout: timedelta) -> Any:
    """High priority where the job communicates with NCCL; see [Note: Priority]."""
    if "nccl" not in backends:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def timeout_of(group: ProcessGroup) -> timedelta:
    """How long ranks wait in it: what the job gave init_process_group, unless it was changed."""
    backend = group._get_backend(group._device_types[0])
    options = getattr(backend, "options", None)
    return getattr(options, "_timeout", None) or c10d._get_default_timeout(dist.get_backend(group))
