"""Where this runs: versions, devices, which rank is on which node, and environment variables that matter."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...fsdp2.versions import TESTED
from ...quant.dispatch import FAST
from ..amx import CAP, CAP_VARIABLE, announces_amx, make_bf16_safe
from .check import Check, Finding, State, Visit, name_ranks

HARMFUL: dict[str, tuple[tuple[str, ...], str]] = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "every kernel waits for the one before: nothing overlaps"),
    "TORCH_NCCL_BLOCKING_WAIT": (("1",), "the host waits for every collective: nothing overlaps"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (("1",), "streams share one queue: communication waits for compute"),
    "NCCL_P2P_DISABLE": (("1",), "GPUs of a node talk through the host's memory"),
    "NCCL_SHM_DISABLE": (("1",), "ranks of a node may talk through the network"),
    "NCCL_IB_DISABLE": (("1",), "nodes talk over TCP, whatever else they have"),
    "NCCL_NET_GDR_LEVEL": (("0", "LOC"), "the network cards do not read GPU memory themselves"),
    "NCCL_ALGO": (("Tree", "tree", "TREE"), "gathers and all-to-alls have no tree: NCCL may refuse them"),
    "NCCL_MAX_NCHANNELS": (("1", "2"), "a collective uses few of the links that there are"),
}
"""Variables, the values of theirs that break or slow down what zeropp does, and how."""
SHOWN = ("NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_NUM_THREADS", CAP_VARIABLE, *HARMFUL)
"""Variables that are shown whatever their value; those that end in _ stand for all that begin so."""


def checks() -> Iterator[Check]:
    here = partial(Check, "surroundings", needs_ranks=False)
    yield here("versions", "compares them on all ranks, and with those tested", _versions, _judge_versions)
    yield here("devices", "compares them; no two ranks may have the same one", _device, _judge_devices)
    yield here("bf16 products", "multiplies in bf16 in a process of its own", _try_bf16, _judge_bf16)
    yield here("nodes", "compares ranks' nodes with the machines they are on", _place, _judge_places)
    yield here("environment", "reads variables that choose or break links", _environment, _judge_environment)


def _versions(visit: Visit) -> dict[str, str]:
    device = visit.world.device.type
    versions = {"torch": str(torch.__version__), "Python": platform.python_version()}
    backends = dict(entry.split(":") for entry in dist.get_backend_config().split(","))
    versions["backend"] = backends.get(device, str(dist.get_backend()))
    if device == "cuda":
        versions["CUDA or ROCm"] = str(torch.version.cuda or torch.version.hip)
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if device in FAST:
        package = FAST[device][1]
        has_it = importlib.util.find_spec(package) is not None
        versions[package] = importlib.metadata.version(package) if has_it else "none"
    return versions


def _judge_versions(everyone: Sequence[dict[str, str]]) -> Finding:
    first = everyone[0]
    if different := _differing(everyone):
        return Finding("fault", f"versions differ: {different}", "install the same everywhere")
    saw = ", ".join(f"{name} {version}" for name, version in first.items())
    if ".".join(first["torch"].split(".")[:2]) not in TESTED:
        return Finding("warning", f"{saw}; tested is torch {', '.join(TESTED)}", "look at the other parts")
    if missing := [name for name, version in first.items() if version == "none"]:
        return Finding(
            "warning", f"{saw}: zeropp quantizes in plain torch, which is slow", f"pip install {missing[0]}"
        )
    return Finding("ok", saw)


class Device(NamedTuple):
    """What a rank computes on."""

    name: str
    driver: str
    identity: str | None
    """Which device it is, among all that are alike; None on a CPU, which ranks share."""


def _device(visit: Visit) -> Device:
    if visit.world.device.type == "cpu":
        name = f"CPU with {torch.backends.cpu.get_cpu_capability()}, cores: {os.cpu_count()}, "
        return Device(f"{name}threads of a rank: {torch.get_num_threads()}", "", None)
    properties = torch.cuda.get_device_properties(visit.world.device)
    name = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return Device(name, _driver(), f"{_machine()} {getattr(properties, 'uuid', visit.world.device)}")


def _driver() -> str:
    """Version of NVIDIA's kernel module, or nothing if there is none."""
    path = Path("/sys/module/nvidia/version")
    return path.read_text().strip() if path.exists() else ""


def _judge_devices(everyone: Sequence[Device]) -> Finding:
    saw = _with_ranks([" ".join(part for part in device[:2] if part) for device in everyone])
    identities = [device.identity for device in everyone if device.identity is not None]
    if shared := sorted({identity for identity in identities if identities.count(identity) > 1}):
        ranks = [rank for rank, device in enumerate(everyone) if device.identity == shared[0]]
        return Finding(
            "fault", f"{name_ranks(ranks)} have one and the same device", "one rank per device: LOCAL_RANK"
        )
    if len({device[:2] for device in everyone}) > 1:
        return Finding("warning", saw, "the slowest device decides how long a step takes")
    return Finding("ok", saw)


class Trial(NamedTuple):
    """Whether products in bf16 end a process on a rank's CPU."""

    is_for_training: bool
    """Whether the rank computes on that CPU."""
    announces_amx: bool
    why: str
    """How a product ended the process; empty if it did not."""


def _try_bf16(visit: Visit) -> Trial:
    _, why = make_bf16_safe()  # caps oneDNN if it must, so that the parts after this one run to their end
    return Trial(visit.world.device.type == "cpu", announces_amx(), why)


def _judge_bf16(everyone: Sequence[Trial]) -> Finding:
    """A fault if the job's own products would end it."""
    if failed := [rank for rank, trial in enumerate(everyone) if trial.why]:
        first = everyone[failed[0]]
        state: State = "fault" if first.is_for_training else "warning"
        return Finding(
            state, f"{name_ranks(failed)}: {first.why}", f"set {CAP_VARIABLE}={CAP} in the job's environment"
        )
    said = ["AMX is announced, and a product in bf16 works" if trial.announces_amx else "AMX is not announced"
            for trial in everyone]  # fmt: skip
    return Finding("ok", _with_ranks(said))


class Place(NamedTuple):
    """Where a rank is, by what its machine says, and where zeropp puts it."""

    machine: str
    network: str
    """Identity of the network that it sees: ranks of one machine may each have their own (zeropp lab)."""
    told_by: str
    node_of: tuple[int, ...]
    """The node of every rank, as this rank has it."""


def _place(visit: Visit) -> Place:
    if visit.settings.node_size is not None:
        told_by = f"--node-size {visit.settings.node_size}"
    else:
        local = os.environ.get("LOCAL_WORLD_SIZE")
        told_by = "host names" if local is None else f"LOCAL_WORLD_SIZE {local} and host names"
    network = Path("/proc/self/ns/net")
    seen = os.readlink(network) if network.exists() else ""
    return Place(_machine(), seen, told_by, visit.topology.node_of)


def _machine() -> str:
    """One name for all ranks of a machine, whatever its containers are called; another on each machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _judge_places(everyone: Sequence[Place]) -> Finding:
    node_of = everyone[0].node_of
    if others := [rank for rank, place in enumerate(everyone) if place.node_of != node_of]:
        return Finding(
            "fault",
            f"{name_ranks(others)} has the nodes {everyone[others[0]].node_of}, rank 0 has {node_of}",
            "start all ranks with the same options and environment",
        )
    members = [[rank for rank, of in enumerate(node_of) if of == node] for node in range(max(node_of) + 1)]
    for node, ranks in enumerate(members):
        machines = [everyone[rank].machine for rank in ranks]
        strangers = [rank for rank in ranks if everyone[rank].machine != max(machines, key=machines.count)]
        if strangers:
            return Finding(
                "fault",
                f"node {node} is {name_ranks(ranks)}, by {everyone[0].told_by}; of them, "
                f"{name_ranks(strangers)} is on another machine",
                "number ranks machine by machine, as torchrun does, or set Config.node_size",
            )
    counts = sorted({len(ranks) for ranks in members})
    layout = "; ".join(f"node {node}: {name_ranks(ranks)}" for node, ranks in enumerate(members))
    saw = f"{layout}, by {everyone[0].told_by}"
    if len(counts) > 1:
        return Finding("fault", saw, "two hops need equally many ranks on each node: Config(route='flat')")
    networks = {(everyone[ranks[0]].machine, everyone[ranks[0]].network) for ranks in members}
    if len(networks) < len(members):
        return Finding(
            "warning",
            f"{saw}; some of these nodes are one machine",
            "what crosses nodes is right, but its speed is not that of a network",
        )
    if len(members) == 1 and len(node_of) > 1:
        return Finding("ok", f"{saw}; nothing crosses nodes")
    return Finding("ok", saw)


def _environment(visit: Visit) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in SHOWN or any(name.startswith(start) for start in SHOWN if start.endswith("_"))
    }


def _judge_environment(everyone: Sequence[dict[str, str]]) -> Finding:
    first = everyone[0]
    saw = ", ".join(f"{name}={value}" for name, value in first.items()) or "none that matter are set"
    harm = [
        f"{name}={value}: {HARMFUL[name][1]}"
        for name, value in first.items()
        if name in HARMFUL and value in HARMFUL[name][0]
    ]
    if harm:
        return Finding("warning", "; ".join(harm), "unset them, unless you know why they are set")
    if different := _differing(everyone):
        return Finding("warning", f"differ: {different}", "set them alike on all nodes")
    return Finding("ok", saw)


def _differing(everyone: Sequence[dict[str, str]]) -> str:
    """What is not the same on all ranks, with who has what."""
    names = {name: None for values in everyone for name in values}
    return "; ".join(
        f"{name}: {_with_ranks([values.get(name, 'not set') for values in everyone])}"
        for name in names
        if len({values.get(name) for values in everyone}) > 1
    )


def _with_ranks(texts: Sequence[str]) -> str:
    """Each text once, with the ranks that have it, if there are several."""
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        by_text.setdefault(text, []).append(rank)
    if len(by_text) == 1:
        return texts[0]
    return ", ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in by_text.items())
