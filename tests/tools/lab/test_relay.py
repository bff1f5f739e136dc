"""The relay that replaces netem, between two socket pairs."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import zeropp.tools.lab

SECONDS = 300.0  # a limit that only ends a hang


@contextmanager
def relay(delay_us: int, loss_percent: float) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Start a relay, and yield the sockets of the node and of the switch."""
    node, node_inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    switch, switch_inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    script = Path(zeropp.tools.lab.__file__).with_name("relay.py")
    fds = [node_inside.fileno(), switch_inside.fileno()]
    command = [sys.executable, "-I", "-S", str(script), *map(str, fds)]
    with node, switch, node_inside, switch_inside:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds, text=True)
        assert process.stdin is not None
        process.stdin.write(f"{delay_us} {loss_percent}\n")
        process.stdin.flush()
        node.settimeout(SECONDS)
        switch.settimeout(SECONDS)
        switch.send(b"ready")
        assert node.recv(100) == b"ready"
        yield node, switch
        process.stdin.close()
        assert process.wait(SECONDS) == 0


def test_packets_from_the_node_wait_and_keep_their_order() -> None:
    with relay(100_000, 0) as (node, switch):
        started = time.monotonic()
        for number in range(20):
            node.send(bytes([number]))
        assert [switch.recv(100)[0] for _ in range(20)] == list(range(20))
        assert time.monotonic() - started >= 0.1


def test_packets_to_the_node_do_not_wait() -> None:
    """Packets to the node arrive while a packet from the node still waits: its delay is longer than the test
    may take."""
    with relay(int(SECONDS * 1e6), 0) as (node, switch):
        node.send(b"waits")
        for _ in range(2):
            switch.send(b"x")
            assert node.recv(100) == b"x"
        switch.setblocking(False)
        with pytest.raises(BlockingIOError):
            switch.recv(100)


def test_the_given_share_of_packets_is_lost() -> None:
    with relay(0, 25.0) as (node, switch):
        arrived = 0
        for _ in range(80):
            for _ in range(5):  # a unix socket holds few packets
                node.send(b"x")
            for _ in range(2):  # the relay moves all packets before it answers the second one
                switch.setblocking(True)
                switch.send(b"ping")
                assert node.recv(100) == b"ping"
            switch.setblocking(False)
            with suppress(BlockingIOError):
                while switch.recv(100):
                    arrived += 1
        assert 240 <= arrived <= 360
