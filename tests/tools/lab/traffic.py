"""Plain TCP between nodes of a lab, without torch: a test of a link in a fraction of a second."""

from __future__ import annotations

import json
import subprocess
import sys

from zeropp.tools.lab import Cluster

RECEIVE = """
import json, socket, time
server = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
connection, _ = server.accept()
received = 0
while chunk := connection.recv(1 << 20):
    received += len(chunk)
print(json.dumps({"bytes": received, "ended": time.monotonic()}), flush=True)
"""
SEND = """
import json, socket, sys, time
started = time.monotonic()
connection = socket.create_connection((sys.argv[1], 5000))
connected = time.monotonic()
connection.sendall(bytes(int(sys.argv[2])))
print(json.dumps({"started": started, "connect_seconds": connected - started}))
"""


def transfer(cluster: Cluster, source: int, target: int, nbytes: int) -> dict[str, float]:
    """Send bytes from node to node. Return received bytes, seconds, and seconds to connect."""
    with Transfer(cluster, source, target, nbytes) as running:
        return running.finish()


class Transfer:
    """A transfer from node to node. The end of the block kills it if it still runs.

    Its time starts before the sender connects and ends after the receiver has the last byte. A busy machine
    makes it longer, never shorter than the link allows."""

    def __init__(self, cluster: Cluster, source: int, target: int, nbytes: int) -> None:
        self._receiver = _start(cluster.inside(target, [sys.executable, "-c", RECEIVE]))
        assert self._receiver.stdout is not None
        assert self._receiver.stdout.readline() == "listening\n"
        send = [sys.executable, "-c", SEND, cluster.address(target), str(nbytes)]
        self._sender = _start(cluster.inside(source, send))

    def finish(self) -> dict[str, float]:
        results: dict[str, float] = {}
        for process in (self._sender, self._receiver):
            output, _ = process.communicate(timeout=600)
            assert process.returncode == 0
            results |= json.loads(output)
        return results | {"seconds": results["ended"] - results["started"]}

    def is_done(self) -> bool:
        return self._receiver.poll() is not None

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._sender, self._receiver):
            process.kill()
            process.communicate()


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
