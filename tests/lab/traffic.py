"""Plain TCP between nodes of a lab, without torch: what a link does, in a fraction of a second."""

from __future__ import annotations

import json
import subprocess
import sys

from zeropp.lab import Cluster

RECEIVE = """
import json, socket, sys, time
server = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
connection, _ = server.accept()
first = connection.recv(1)
started, received = time.monotonic(), 1
while chunk := connection.recv(1 << 20):
    received += len(chunk)
print(json.dumps({"bytes": received, "seconds": time.monotonic() - started}), flush=True)
"""
SEND = """
import json, socket, sys, time
started = time.monotonic()
connection = socket.create_connection((sys.argv[1], 5000))
connected = time.monotonic()
connection.sendall(bytes(int(sys.argv[2])))
print(json.dumps({"connect_seconds": connected - started}))
"""


def transfer(cluster: Cluster, source: int, target: int, nbytes: int) -> dict[str, float]:
    """Send bytes from node to node: received bytes, seconds, and how long it took to connect."""
    receiver = subprocess.Popen(
        cluster.inside(target, [sys.executable, "-c", RECEIVE]), stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "listening\n"
    send = [sys.executable, "-c", SEND, cluster.address(target), str(nbytes)]
    sent = subprocess.run(
        cluster.inside(source, send), stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    answer, _ = receiver.communicate(timeout=300)
    return {**json.loads(answer), **json.loads(sent.stdout)}
