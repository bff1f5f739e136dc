"""`Cluster`: nodes on one machine for torchrun jobs. Nodes are network namespaces with shaped links."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .job import Job, JobResult, OnLine, rank_environment, torchrun
from .link_properties import parse_delay_us, parse_loss_percent, parse_rate_bit_s
from .processes import LAB_VARIABLE, lab_folder, lab_id

INTERFACE = "eth0"
FIRST_PORT = 29500
MAX_NODES, MAX_RANKS_PER_NODE = 64, 64
HERE = Path(__file__).parent


class LabError(RuntimeError):
    """This machine cannot build a lab, or the lab's network process has ended."""


@dataclass(frozen=True)
class LinkCounters:
    """Traffic of a node's interface since the cluster was built."""

    tx_bytes: int
    rx_bytes: int
    tx_packets: int
    rx_packets: int

    def since(self, earlier: LinkCounters) -> LinkCounters:
        return LinkCounters(
            self.tx_bytes - earlier.tx_bytes,
            self.rx_bytes - earlier.rx_bytes,
            self.tx_packets - earlier.tx_packets,
            self.rx_packets - earlier.rx_packets,
        )


@dataclass(frozen=True)
class Link:
    """Properties of a node's link, as text."""

    link: str = "1gbit"
    """Rate in each direction, or "unlimited"."""
    delay: str = "0ms"
    """One-way delay from this node to any other."""
    loss: str = "0%"
    """Share of lost packets of those that this node sends."""

    def request(self) -> dict[str, Any]:
        """Return the parsed properties, as network.py takes them. Raises ValueError for invalid ones."""
        return {
            "rate_bit_s": parse_rate_bit_s(self.link),
            "delay_us": parse_delay_us(self.delay),
            "loss_percent": parse_loss_percent(self.loss),
        }


class Cluster:
    """Nodes on a switch. Each node has one link, and all links are alike at first.

        with Cluster(nodes=2, ranks_per_node=2, link="300mbit") as cluster:
            cluster.run(["train.py", "--steps", "10"]).check()
            print(cluster.counters())

    It works as root or in a user namespace. The end of the block removes everything, and so does the death of
    this process: see [Note: End of life] in network.py.
    """

    def __init__(
        self,
        nodes: int = 2,
        ranks_per_node: int = 2,
        link: str = "1gbit",
        delay: str = "0ms",
        loss: str = "0%",
    ) -> None:
        _check_count("nodes", nodes, MAX_NODES)
        _check_count("ranks_per_node", ranks_per_node, MAX_RANKS_PER_NODE)
        self.nodes, self.ranks_per_node = nodes, ranks_per_node
        self.links = [Link(link, delay, loss)] * nodes
        """Current properties of each node's link."""
        self.links[0].request()
        self.rootless = False
        self._network: subprocess.Popen[str] | None = None
        self._namespace_fds: list[int] = []
        self._addresses: list[str] = []
        self._jobs = 0
        self._lock = threading.Lock()

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def __enter__(self) -> Self:
        """Build the cluster. Raises LabError if this machine cannot."""
        if find_spec("pyroute2") is None:
            raise LabError("the lab needs the package pyroute2: pip install 'zeropp[lab]'")
        self._network = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "network.py"), str(self.nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.folder = lab_folder(lab_id(self._network.pid))
        """Folder for small files. It exists as long as the cluster."""
        try:
            self.folder.mkdir(mode=0o700)
            built = self._read_answer()
            self.rootless, self._namespace_fds = built["rootless"], built["namespace_fds"]
            self._addresses = built["addresses"]
            for node, link in enumerate(self.links):
                self._request({"do": "set", "node": node, **link.request()})
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything. A second call does nothing."""
        if self._network is None:
            return
        network, self._network = self._network, None
        for stream in (network.stdin, network.stdout, network.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        network.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(
        self,
        program: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        on_line: OnLine | None = None,
        log_folder: Path | None = None,
    ) -> Job:
        """Start a Python program with torchrun on every node.

        Args:
            program: ["train.py", ...] or ["-m", "module", ...].
            environment: additional environment variables of the ranks.
            on_line: called with each line of output.
            log_folder: folder for a log of each rank and node.
        """
        if log_folder is not None:
            log_folder.mkdir(parents=True, exist_ok=True)
        self._jobs += 1
        folder = self.folder / str(self._jobs)
        folder.mkdir()
        port = FIRST_PORT + self._jobs
        commands = [
            self.inside(node, self._torchrun(node, port, folder, program)) for node in range(self.nodes)
        ]
        return Job(
            commands,
            self.ranks_per_node,
            self._environment(environment or {}),
            folder,
            on_line=on_line,
            log_folder=log_folder,
            kill=self._kill,
        )

    def run(
        self, program: Sequence[str], *, timeout_seconds: float | None = None, **options: Any
    ) -> JobResult:
        """Start a program and wait for it. `options` are those of `start`."""
        return self.start(program, **options).wait(timeout_seconds)

    def inside(self, node: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` inside a node, as long as the cluster is up."""
        owner = str(self._running().pid)
        namespace_fd = str(self._namespace_fds[self._check_node(node)])
        enter = [sys.executable, "-I", "-S", str(HERE / "enter_node.py")]
        return [*enter, owner, namespace_fd, str(int(self.rootless)), *command]

    def address(self, node: int) -> str:
        """Return the IP address of a node."""
        return self._addresses[self._check_node(node)]

    def counters(self) -> list[LinkCounters]:
        """Return the kernel's counters of every node's link."""
        return [LinkCounters(**values) for values in self._request({"do": "counters"})]

    def set_link(
        self,
        node: int | None = None,
        *,
        link: str | None = None,
        delay: str | None = None,
        loss: str | None = None,
    ) -> None:
        """Change properties of a node's link, or of all links, at any time. None leaves a property as is."""
        for number in range(self.nodes) if node is None else [self._check_node(node)]:
            old = self.links[number]
            new = Link(link or old.link, delay or old.delay, loss or old.loss)
            self._request({"do": "set", "node": number, **new.request()})
            self.links[number] = new

    def link_down(self, node: int) -> None:
        """Disconnect a node. Its ranks still reach each other."""
        self._request({"do": "down", "node": self._check_node(node)})

    def link_up(self, node: int) -> None:
        self._request({"do": "up", "node": self._check_node(node)})

    def _kill(self) -> None:
        """Kill all processes on the nodes."""
        # Without a network process they are dead already: [Note: End of life] in network.py.
        with contextlib.suppress(LabError):
            self._request({"do": "kill"})

    def _torchrun(self, node: int, port: int, folder: Path, program: Sequence[str]) -> list[str]:
        nodes = ("--nnodes", str(self.nodes), "--node-rank", str(node))
        master = ("--master-addr", self.address(0), "--master-port", str(port))
        return torchrun((*nodes, *master), self.ranks_per_node, folder, f"node-{node}", program)

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        ours = {"GLOO_SOCKET_IFNAME": INTERFACE, LAB_VARIABLE: lab_id(self._running().pid)}
        return rank_environment({**ours, **extra})

    def _request(self, request: dict[str, Any]) -> Any:
        network = self._running()
        assert network.stdin is not None
        with self._lock:  # a `Schedule` changes links from its thread
            try:
                network.stdin.write(json.dumps(request) + "\n")
                network.stdin.flush()
            except BrokenPipeError:
                raise LabError(self._exit_message()) from None
            return self._read_answer()["result"]

    def _read_answer(self) -> dict[str, Any]:
        network = self._running()
        assert network.stdout is not None
        line = network.stdout.readline()
        if not line:
            raise LabError(self._exit_message())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LabError(_explain(answer["error"], answer.get("rootless")))
        return answer

    def _exit_message(self) -> str:
        network = self._running()
        assert network.stderr is not None
        return (
            f"the lab's network process ended ({network.wait()}): {network.stderr.read().strip() or 'killed'}"
        )

    def _running(self) -> subprocess.Popen[str]:
        if self._network is None:
            raise LabError("the cluster is not up; use it inside its `with` block")
        return self._network

    def _check_node(self, node: int) -> int:
        if not 0 <= node < self.nodes:
            raise ValueError(f"node is {node!r}; expected a number from 0 to {self.nodes - 1}")
        return node


def _check_count(name: str, value: object, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{name} is {value!r}; expected a number from 1 to {most}")


def _explain(error: str, rootless: bool | None) -> str:
    """Add the missing privileges or kernel features to an error of the build.

    Args:
        error: the error of the network process.
        rootless: whether the lab is rootless. None: the error is from a request after the build.
    """
    if rootless is None:
        return error
    if rootless:
        need = (
            "without root the lab needs unprivileged user namespaces: check the sysctls "
            "user.max_user_namespaces, kernel.unprivileged_userns_clone and "
            "kernel.apparmor_restrict_unprivileged_userns, or run as root (in a container: with the "
            "capabilities SYS_ADMIN and NET_ADMIN, for example docker run --privileged)"
        )
    else:
        need = "the lab needs a kernel with network namespaces, veth, bridge and the tbf qdisc (sch_tbf)"
    return f"{error}; {need}"
