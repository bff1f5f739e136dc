"""The process that owns a lab's network. `Cluster` runs this script, which does not import torch.

                     node 0                     switch                     node 1
    ranks -- eth0 [tbf, netem] ===veth=== [tbf] node0                eth0 -- ranks
                                                 br0  node1 ===veth===

Each node and the switch are network namespaces, and only this process holds them open. They have no names in
the file system, and the machine's own namespace has no part of the lab. The kernel removes everything when
this process and the ranks have ended.

[Note: End of life]
Standard input is a pipe from the owner. It closes when the owner leaves its `with` block or is killed. This
process then kills all processes in its namespaces and exits.

[Note: Rootless]
Without CAP_SYS_ADMIN and CAP_NET_ADMIN the namespaces belong to a user namespace, in which this process has
both. The user is mapped to itself, so programs in the lab have the same user and the same files.

[Note: Sizes]
A shaper with a large bucket would send short messages at any speed. The bucket is therefore 32 KiB, or 100 us
at high rates. Packets (with GSO the kernel moves many frames as one) are smaller than the bucket, because tbf
would split larger ones. The queue has room for all bytes that TCP may have in flight, so links lose packets
only because of `loss_percent`.

Protocol: one JSON object per line, and one per answer. {"do": "set", "node": 0, "rate_bit_s": ...,
"delay_us": ..., "loss_percent": ...}, {"do": "up" | "down", "node": 0}, {"do": "counters"}, {"do": "kill"}.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute, NetlinkError  # type: ignore[import-untyped]

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
TC_ROOT, TBF, NETEM, TBF_CHILD = 0xFFFFFFFF, "1:", "10:", 0x10001
ETH_P_ALL, PACKET_IGNORE_OUTGOING, PACKET_VNET_HDR, SOL_PACKET = 0x0003, 23, 15, 263
MTU = 9000
BUCKET_BYTES, BUCKET_SECONDS, GSO_MAX_BYTES = 32 * 1024, 100e-6, 27_000
QUEUE_BYTES, QUEUE_SECONDS, QUEUE_PACKETS = 4 * 2**20, 0.1, 100_000

libc = ctypes.CDLL(None, use_errno=True)


class NetworkError(Exception):
    """An error that the owner raises as its own LabError."""


@dataclass
class Node:
    """A namespace with its link."""

    namespace_fd: int
    netlink: Any
    interface: int
    """Index of eth0 in the node."""
    port: int
    """Index of the other end of the link, in the switch."""
    relay: subprocess.Popen[str] | None = None
    """Process for delay and loss if the kernel has no netem: see relay.py."""


class Network:
    """All namespaces and links of a lab."""

    def __init__(self, nodes: int) -> None:
        namespaces = [_new_namespace() for _ in range(nodes)]
        _, self.switch = _new_namespace()  # the last one, because this process stays in it
        self._add_link(self.switch, ifname="br0", kind="bridge", br_stp_state=0)
        self.bridge = _index(self.switch, "br0")
        self.switch.link("set", index=self.bridge, state="up")
        self.nodes = [self._add_node(number, *namespace) for number, namespace in enumerate(namespaces)]

    def _add_node(self, number: int, namespace_fd: int, netlink: Any) -> Node:
        peer = {"ifname": "eth0", "net_ns_fd": namespace_fd, "mtu": MTU}
        self._add_link(self.switch, ifname=f"node{number}", kind="veth", mtu=MTU, peer=peer)
        node = Node(namespace_fd, netlink, _index(netlink, "eth0"), _index(self.switch, f"node{number}"))
        netlink.link("set", index=_index(netlink, "lo"), state="up")
        netlink.addr("add", index=node.interface, address=address(number), prefixlen=16)
        netlink.link("set", index=node.interface, state="up", gso_max_size=GSO_MAX_BYTES)
        self.switch.link("set", index=node.port, master=self.bridge, state="up", gso_max_size=GSO_MAX_BYTES)
        return node

    @staticmethod
    def _add_link(netlink: Any, **options: Any) -> None:
        try:
            netlink.link("add", **options)
        except NetlinkError as error:
            raise NetworkError(
                f"the kernel cannot make a {options['kind']} interface ({error.args[-1]})"
            ) from None

    def set(self, node: int, rate_bit_s: int | None, delay_us: int, loss_percent: float) -> None:
        """Shape both directions of a node's link. Delay and loss apply to packets that leave the node."""
        chosen = self.nodes[node]
        for netlink, interface in ((chosen.netlink, chosen.interface), (self.switch, chosen.port)):
            _shape(netlink, interface, rate_bit_s)
        if chosen.relay is None and not self._set_netem(chosen, rate_bit_s, delay_us, loss_percent):
            chosen.relay = self._start_relay(node)
        if chosen.relay is not None and chosen.relay.stdin is not None:
            chosen.relay.stdin.write(f"{delay_us} {loss_percent}\n")
            chosen.relay.stdin.flush()

    @staticmethod
    def _set_netem(node: Node, rate_bit_s: int | None, delay_us: int, loss_percent: float) -> bool:
        """Set delay and loss. Return False if this needs netem and the kernel has none."""
        parent = TC_ROOT if rate_bit_s is None else TBF_CHILD
        if not delay_us and not loss_percent:
            if _has_qdisc(node.netlink, node.interface, "netem"):
                node.netlink.tc("del", index=node.interface, handle=NETEM, parent=parent)
            return True
        try:
            node.netlink.tc(
                "replace", "netem", node.interface, NETEM, parent=parent,
                delay=delay_us, loss=loss_percent, limit=QUEUE_PACKETS,
            )  # fmt: skip
        except NetlinkError as error:
            if error.code == 2:  # ENOENT
                return False
            raise
        return True

    def _start_relay(self, number: int) -> subprocess.Popen[str]:
        """Put a relay and another veth pair between the node's port and the bridge."""
        outer, inner = f"relay{number}", f"relay{number}in"
        self._add_link(self.switch, ifname=outer, kind="veth", mtu=MTU, peer={"ifname": inner, "mtu": MTU})
        outer_index, inner_index = _index(self.switch, outer), _index(self.switch, inner)
        self.switch.link("set", index=self.nodes[number].port, master=0)
        self.switch.link("set", index=inner_index, state="up", gso_max_size=GSO_MAX_BYTES)
        self.switch.link("set", index=outer_index, master=self.bridge, state="up", gso_max_size=GSO_MAX_BYTES)
        sockets = [_packet_socket(name) for name in (f"node{number}", inner)]
        script = Path(__file__).with_name("relay.py")
        fds = [packets.fileno() for packets in sockets]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), *map(str, fds)],
            stdin=subprocess.PIPE,
            pass_fds=fds,
            text=True,
        )
        for packets in sockets:
            packets.close()
        return process

    def set_port(self, node: int, state: str) -> None:
        """Set a node's port of the switch up or down. Ranks of one node still reach each other."""
        self.switch.link("set", index=self.nodes[node].port, state=state)

    def counters(self) -> list[dict[str, int]]:
        """Return the kernel's counters of each node's eth0, as in /sys/class/net/eth0/statistics."""
        names = ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")
        statistics = [n.netlink.get_links(n.interface)[0].get_attr("IFLA_STATS64") for n in self.nodes]
        return [{name: values[name] for name in names} for values in statistics]

    def kill_all(self) -> None:
        """Kill every process on the nodes. A second pass finds processes that started during the first."""
        inodes = {os.fstat(node.namespace_fd).st_ino for node in self.nodes}
        for _ in range(2):
            for entry in Path("/proc").iterdir():
                if not entry.name.isdigit() or int(entry.name) == os.getpid():
                    continue
                try:
                    if os.stat(entry / "ns/net").st_ino in inodes:
                        os.kill(int(entry.name), signal.SIGKILL)
                except OSError:
                    continue  # it has ended, or belongs to another user


def address(node: int) -> str:
    return f"10.77.{node // 250}.{node % 250 + 1}"


def _shape(netlink: Any, interface: int, rate_bit_s: int | None) -> None:
    if rate_bit_s is None:
        if _has_qdisc(netlink, interface, "tbf"):
            netlink.tc("del", index=interface, handle=TBF, parent=TC_ROOT)
        return
    rate = rate_bit_s // 8
    bucket_bytes = max(BUCKET_BYTES, int(rate * BUCKET_SECONDS))
    queue_bytes = max(QUEUE_BYTES, int(rate * QUEUE_SECONDS))
    netlink.tc(
        "replace", "tbf", interface, TBF, parent=TC_ROOT, rate=rate, burst=bucket_bytes, limit=queue_bytes
    )


def _has_qdisc(netlink: Any, interface: int, kind: str) -> bool:
    return any(qdisc.get_attr("TCA_KIND") == kind for qdisc in netlink.get_qdiscs(interface))


def _new_namespace() -> tuple[int, Any]:
    """Create a network namespace and a netlink socket in it. This process stays in the namespace."""
    _call(libc.unshare, CLONE_NEWNET, what="create a network namespace")
    return os.open("/proc/self/ns/net", os.O_RDONLY), IPRoute()


def _packet_socket(interface: str) -> socket.socket:
    """Return a socket for all packets of an interface, with the kernel's header for checksums and GSO."""
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    packets.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    packets.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    try:
        packets.setsockopt(socket.SOL_SOCKET, 33, 16 * 2**20)  # SO_RCVBUFFORCE, which ignores rmem_max
    except PermissionError:
        packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
    packets.bind((interface, ETH_P_ALL))
    return packets


def _index(netlink: Any, name: str) -> int:
    (index,) = netlink.link_lookup(ifname=name)
    return int(index)


def _call(function: Any, *args: int, what: str) -> None:
    if function(*args) != 0:
        raise NetworkError(f"cannot {what}: {os.strerror(ctypes.get_errno())}")


def _is_privileged() -> bool:
    status = Path("/proc/self/status").read_text()
    (effective,) = (line.split()[1] for line in status.splitlines() if line.startswith("CapEff"))
    return all(int(effective, 16) >> capability & 1 for capability in (CAP_NET_ADMIN, CAP_SYS_ADMIN))


def _enter_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    _call(libc.unshare, CLONE_NEWUSER, what="create a user namespace")
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    except PermissionError:
        pass  # uid 0 without capabilities cannot be mapped; rights are the same, and getuid() is nobody's


def _answer(network: Network, request: dict[str, Any]) -> object:
    action = request.pop("do")
    if action == "counters":
        return network.counters()
    if action == "set":
        network.set(**request)
    elif action == "kill":
        network.kill_all()
    else:
        network.set_port(request["node"], action)
    return None


def _send(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(nodes: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C: see [Note: End of life]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rootless = not _is_privileged()
    try:
        if rootless:
            _enter_user_namespace()
        network = Network(nodes)
    except (NetworkError, OSError) as error:
        _send({"error": str(error), "rootless": rootless})
        return
    fds = [node.namespace_fd for node in network.nodes]
    try:
        addresses = [address(number) for number in range(nodes)]
        _send({"rootless": rootless, "namespace_fds": fds, "addresses": addresses})
        for line in sys.stdin:
            try:
                answer: dict[str, Any] = {"result": _answer(network, json.loads(line))}
            except (NetlinkError, OSError) as error:
                answer = {"error": str(error)}
            _send(answer)
    finally:
        network.kill_all()


if __name__ == "__main__":
    main(int(sys.argv[1]))
