"""Delay and loss for one link, in a kernel without netem. Run as a script by network.py.

Two packet sockets: the node's side and the switch's. What comes from the node is lost with the given
probability or waits for the given time; what goes to the node passes. Packets carry the kernel's virtio-net
header, so that large segments and unfinished checksums survive the trip.

Standard input brings "<delay_us> <loss_percent>" lines, and ends the process when it closes.
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
"""Packets that are moved before the clock is read again."""


def main(node_fd: int, switch_fd: int) -> None:
    node, switch = socket.socket(fileno=node_fd), socket.socket(fileno=switch_fd)
    for packets in (node, switch):
        packets.setblocking(False)
    dice = random.Random(0)
    waiting: deque[tuple[float, bytes]] = deque()  # in order of arrival, and so of release
    delay_seconds = loss = 0.0
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([0, node_fd, switch_fd], [], [], timeout)
        now = time.monotonic()
        if 0 in ready:
            lines = os.read(0, 4096).decode().split("\n")
            if lines == [""]:
                return
            delay_us, loss_percent = lines[-2].split()
            delay_seconds, loss = int(delay_us) / 1e6, float(loss_percent) / 100
        if node_fd in ready:
            waiting += ((now + delay_seconds, packet) for packet in _receive(node) if dice.random() >= loss)
        if switch_fd in ready:
            for packet in _receive(switch):
                _send(node, packet)
        while waiting and waiting[0][0] <= now:
            _send(switch, waiting.popleft()[1])


def _receive(packets: socket.socket) -> list[bytes]:
    received = []
    try:
        for _ in range(BURST):
            received.append(packets.recv(MAX_PACKET_BYTES))
    except OSError:  # nothing there yet, or the interface went down
        pass
    return received


def _send(packets: socket.socket, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # a full queue or an interface that is down loses packets, as in life
        packets.send(packet)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
