"""Checks of the environment: versions, devices, the node of each rank, and environment variables."""

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
from .check import Check, CheckResult, Session, State, name_ranks

HARMFUL: dict[str, tuple[tuple[str, ...], str]] = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "every kernel waits for the previous one: nothing overlaps"),
    "TORCH_NCCL_BLOCKING_WAIT": (("1",), "the host waits for every collective: nothing overlaps"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (("1",), "streams share one queue: communication waits for compute"),
    "NCCL_P2P_DISABLE": (("1",), "GPUs of a node communicate through host memory"),
    "NCCL_SHM_DISABLE": (("1",), "ranks of a node may communicate over the network"),
    "NCCL_IB_DISABLE": (("1",), "nodes communicate over TCP, not over InfiniBand"),
    "NCCL_NET_GDR_LEVEL": (("0", "LOC"), "network cards do not read GPU memory directly"),
    "NCCL_ALGO": (
        ("Tree", "tree", "TREE"),
        "all-gather and all-to-all have no tree: NCCL may refuse them",
    ),
    "NCCL_MAX_NCHANNELS": (("1", "2"), "a collective uses few of the links"),
}
"""Variables with values that break or slow down zeropp, and the effect."""
SHOWN = ("NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_NUM_THREADS", CAP_VARIABLE, *HARMFUL)
"""Variables that are always shown. A name that ends in _ is a prefix."""


def checks() -> Iterator[Check]:
    here = partial(Check, "surroundings", needs_ranks=False)
    yield here("versions", "compared between ranks, and with the tested versions", _versions, _judge_versions)
    yield here("devices", "compared between ranks; no two ranks may share one", _device, _judge_devices)
    yield here("bf16 products", "a product in bf16, in a separate process", _try_bf16, _judge_bf16)
    yield here("nodes", "the node of each rank, compared with its machine", _locate, _judge_locations)
    yield here("environment", "variables that select or break links", _environment, _judge_environment)


def _versions(session: Session) -> dict[str, str]:
    device = session.world.device.type
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


def _judge_versions(everyone: Sequence[dict[str, str]]) -> CheckResult:
    first = everyone[0]
    if different := _differing(everyone):
        return CheckResult("fault", f"versions differ: {different}", "install the same versions on all nodes")
    saw = ", ".join(f"{name} {version}" for name, version in first.items())
    if ".".join(first["torch"].split(".")[:2]) not in TESTED:
        return CheckResult("warning", f"{saw}; tested with torch {', '.join(TESTED)}", "read the other parts")
    if missing := [name for name, version in first.items() if version == "none"]:
        return CheckResult(
            "warning", f"{saw}: zeropp quantizes in plain torch, which is slow", f"pip install {missing[0]}"
        )
    return CheckResult("ok", saw)


class Device(NamedTuple):
    """The device of a rank."""

    name: str
    driver: str
    identity: str | None
    """Unique name of the device; None for a CPU, which ranks share."""


def _device(session: Session) -> Device:
    if session.world.device.type == "cpu":
        name = f"CPU with {torch.backends.cpu.get_cpu_capability()}, cores: {os.cpu_count()}, "
        return Device(f"{name}threads of a rank: {torch.get_num_threads()}", "", None)
    properties = torch.cuda.get_device_properties(session.world.device)
    name = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return Device(name, _driver(), f"{_machine()} {getattr(properties, 'uuid', session.world.device)}")


def _driver() -> str:
    """Return the version of NVIDIA's kernel module, or an empty string."""
    path = Path("/sys/module/nvidia/version")
    return path.read_text().strip() if path.exists() else ""


def _judge_devices(everyone: Sequence[Device]) -> CheckResult:
    saw = _with_ranks([" ".join(part for part in device[:2] if part) for device in everyone])
    identities = [device.identity for device in everyone if device.identity is not None]
    if shared := sorted({identity for identity in identities if identities.count(identity) > 1}):
        ranks = [rank for rank, device in enumerate(everyone) if device.identity == shared[0]]
        return CheckResult(
            "fault", f"{name_ranks(ranks)} share a device", "use one device per rank: LOCAL_RANK"
        )
    if len({device[:2] for device in everyone}) > 1:
        return CheckResult("warning", saw, "the slowest device determines the step time")
    return CheckResult("ok", saw)


class Bf16Trial(NamedTuple):
    """The outcome of a bf16 product on the CPU of a rank."""

    is_for_training: bool
    """Whether the rank trains on its CPU."""
    announces_amx: bool
    failure: str
    """How the product ended its process; empty if it worked."""


def _try_bf16(session: Session) -> Bf16Trial:
    _, failure = make_bf16_safe()  # also caps oneDNN if necessary, so that the later parts survive
    return Bf16Trial(session.world.device.type == "cpu", announces_amx(), failure)


def _judge_bf16(everyone: Sequence[Bf16Trial]) -> CheckResult:
    """Return a fault if bf16 products of the training would end it."""
    if failed := [rank for rank, trial in enumerate(everyone) if trial.failure]:
        first = everyone[failed[0]]
        state: State = "fault" if first.is_for_training else "warning"
        advice = f"set {CAP_VARIABLE}={CAP} in the job's environment"
        return CheckResult(state, f"{name_ranks(failed)}: {first.failure}", advice)
    texts = {True: "AMX is announced, and a product in bf16 works", False: "AMX is not announced"}
    return CheckResult("ok", _with_ranks([texts[trial.announces_amx] for trial in everyone]))


class RankLocation(NamedTuple):
    """The machine of a rank, and the nodes of all ranks as this rank has detected them."""

    machine: str
    network: str
    """Identity of the rank's network namespace. Ranks of one machine may have different ones (zeropp lab)."""
    node_source: str
    """Setting or environment variable that determines the nodes."""
    node_of: tuple[int, ...]
    """Node of every rank."""


def _locate(session: Session) -> RankLocation:
    if session.settings.node_size is not None:
        node_source = f"--node-size {session.settings.node_size}"
    else:
        local = os.environ.get("LOCAL_WORLD_SIZE")
        node_source = "host names" if local is None else f"LOCAL_WORLD_SIZE {local} and host names"
    namespace = Path("/proc/self/ns/net")
    network = os.readlink(namespace) if namespace.exists() else ""
    return RankLocation(_machine(), network, node_source, session.topology.node_of)


def _machine() -> str:
    """Return a unique name of this machine. It is the same in all containers, unlike the host name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _judge_locations(everyone: Sequence[RankLocation]) -> CheckResult:
    node_of, source = everyone[0].node_of, everyone[0].node_source
    if others := [rank for rank, location in enumerate(everyone) if location.node_of != node_of]:
        return CheckResult(
            "fault",
            f"{name_ranks(others)} detected the nodes {everyone[others[0]].node_of}, rank 0 {node_of}",
            "start all ranks with the same options and environment",
        )
    nodes = [[rank for rank, of in enumerate(node_of) if of == node] for node in range(max(node_of) + 1)]
    for node, ranks in enumerate(nodes):
        if strays := _ranks_on_other_machines(ranks, everyone):
            return CheckResult(
                "fault",
                f"node {node} is {name_ranks(ranks)}, by {source}; {name_ranks(strays)}: another machine",
                "number ranks machine by machine, as torchrun does, or set Config.node_size",
            )
    layout = "; ".join(f"node {node}: {name_ranks(ranks)}" for node, ranks in enumerate(nodes))
    return _judge_layout(nodes, f"{layout}, by {source}", everyone)


def _ranks_on_other_machines(ranks: Sequence[int], everyone: Sequence[RankLocation]) -> list[int]:
    """Return the ranks of a node that are on another machine than most ranks of the node."""
    machines = [everyone[rank].machine for rank in ranks]
    most_common = max(machines, key=machines.count)
    return [rank for rank, machine in zip(ranks, machines, strict=True) if machine != most_common]


def _judge_layout(nodes: Sequence[Sequence[int]], saw: str, everyone: Sequence[RankLocation]) -> CheckResult:
    """Judge the sizes of the nodes, and whether a network connects them."""
    if len({len(ranks) for ranks in nodes}) > 1:
        return CheckResult(
            "fault", saw, "two hops need equal numbers of ranks per node: Config(route='flat')"
        )
    networks = {(everyone[ranks[0]].machine, everyone[ranks[0]].network) for ranks in nodes}
    if len(networks) < len(nodes):
        return CheckResult(
            "warning",
            f"{saw}; several of these nodes are on one machine",
            "cross-node traffic is correct, but its speed is not that of a network",
        )
    crosses_no_nodes = len(nodes) == 1 and len(everyone) > 1
    return CheckResult("ok", f"{saw}; no traffic crosses nodes" if crosses_no_nodes else saw)


def _environment(session: Session) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in SHOWN or any(name.startswith(start) for start in SHOWN if start.endswith("_"))
    }


def _judge_environment(everyone: Sequence[dict[str, str]]) -> CheckResult:
    first = everyone[0]
    saw = ", ".join(f"{name}={value}" for name, value in first.items()) or "no relevant variable is set"
    harm = [
        f"{name}={value}: {HARMFUL[name][1]}"
        for name, value in first.items()
        if name in HARMFUL and value in HARMFUL[name][0]
    ]
    if harm:
        return CheckResult("warning", "; ".join(harm), "unset them, unless they are set on purpose")
    if different := _differing(everyone):
        return CheckResult("warning", f"differ: {different}", "set the same values on all nodes")
    return CheckResult("ok", saw)


def _differing(everyone: Sequence[dict[str, str]]) -> str:
    """Describe the entries that differ between ranks."""
    names = {name: None for values in everyone for name in values}
    return "; ".join(
        f"{name}: {_with_ranks([values.get(name, 'not set') for values in everyone])}"
        for name in names
        if len({values.get(name) for values in everyone}) > 1
    )


def _with_ranks(texts: Sequence[str]) -> str:
    """Join the different texts, with their ranks if there are several."""
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        by_text.setdefault(text, []).append(rank)
    if len(by_text) == 1:
        return texts[0]
    return ", ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in by_text.items())
