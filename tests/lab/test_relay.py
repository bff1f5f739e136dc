"""The relay that stands in for netem, between two socket pairs."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zeropp.lab


@contextmanager
def relay(delay_us: int, loss_percent: float) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The ends that the node and the switch would have."""
    node, node_inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    switch, switch_inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    script = Path(zeropp.lab.__file__).with_name("relay.py")
    fds = [node_inside.fileno(), switch_inside.fileno()]
    command = [sys.executable, "-I", "-S", str(script), *map(str, fds)]
    with node, switch, node_inside, switch_inside:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds, text=True)
        assert process.stdin is not None
        process.stdin.write(f"{delay_us} {loss_percent}\n")
        process.stdin.flush()
        node.settimeout(10)
        switch.settimeout(10)
        switch.send(b"ready")
        assert node.recv(100) == b"ready"
        yield node, switch
        process.stdin.close()
        assert process.wait(5) == 0


def test_packets_from_the_node_wait_and_keep_their_order() -> None:
    with relay(100_000, 0) as (node, switch):
        started = time.monotonic()
        for number in range(20):
            node.send(bytes([number]))
        assert [switch.recv(100)[0] for _ in range(20)] == list(range(20))
        assert 0.1 <= time.monotonic() - started < 1.0


def test_packets_to_the_node_do_not_wait() -> None:
    with relay(2_000_000, 0) as (node, switch):
        started = time.monotonic()
        switch.send(b"x")
        assert node.recv(100) == b"x"
        assert time.monotonic() - started < 1.0


def test_the_given_share_of_packets_is_lost() -> None:
    with relay(0, 25.0) as (node, switch):
        arrived = 0
        switch.settimeout(0.5)
        for number in range(400):
            node.send(b"x")
            if number % 5 == 4:
                time.sleep(0.005)  # a unix socket holds few packets
        try:
            while switch.recv(100):
                arrived += 1
        except TimeoutError:
            pass
        assert 240 <= arrived <= 360
