"""Delay and loss of one link, for kernels without netem. network.py runs this script.

The relay has two packet sockets, to the node and to the switch. It drops packets from the node with the given
probability, or delays them by the given time. Packets to the node pass immediately. Packets have the kernel's
virtio-net header, which preserves large segments and unfinished checksums.

Each line of standard input is "<delay_us> <loss_percent>". The process ends when standard input closes.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import sys
import time
from collections import deque

MAX_PACKET_BYTES = 70_000
BURST = 64
"""Maximum number of packets between two looks at the clock."""


def main(node_fd: int, switch_fd: int) -> None:
    node, switch = socket.socket(fileno=node_fd), socket.socket(fileno=switch_fd)
    for packets in (node, switch):
        packets.setblocking(False)
    random_numbers = random.Random(0)
    waiting: deque[tuple[float, bytes]] = deque()  # (time of release, packet), in order of arrival
    delay_seconds = loss = 0.0
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([0, node_fd, switch_fd], [], [], timeout)
        now = time.monotonic()
        if 0 in ready:
            lines = os.read(0, 4096).decode().split("\n")
            if lines == [""]:
                return
            delay_seconds, loss = _parse(lines[-2])
        if node_fd in ready:
            kept = (packet for packet in _receive(node) if random_numbers.random() >= loss)
            waiting += ((now + delay_seconds, packet) for packet in kept)
        if switch_fd in ready:
            for packet in _receive(switch):
                _send(node, packet)
        while waiting and waiting[0][0] <= now:
            _send(switch, waiting.popleft()[1])


def _parse(line: str) -> tuple[float, float]:
    """Return the delay in seconds, and the probability of loss."""
    delay_us, loss_percent = line.split()
    return int(delay_us) / 1e6, float(loss_percent) / 100


def _receive(packets: socket.socket) -> list[bytes]:
    received = []
    try:
        for _ in range(BURST):
            received.append(packets.recv(MAX_PACKET_BYTES))
    except OSError:  # no more packets, or the interface is down
        pass
    return received


def _send(packets: socket.socket, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # a full queue or a down interface loses packets, as on real links
        packets.send(packet)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
