"""Start and end of clusters, and errors of clusters that cannot be built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools.lab.traffic import transfer
from zeropp.tools.lab import Cluster, LabError

BUILD = """
from zeropp.tools.lab import Cluster
import subprocess
with Cluster(nodes=2, ranks_per_node=1) as cluster:
    see = subprocess.run(cluster.inside(1, ["cat", "/proc/net/dev"]), stdout=subprocess.PIPE, text=True)
    print("rootless", cluster.rootless, "eth0" in see.stdout, len(cluster.counters()))
"""
WITHOUT_CAPABILITIES = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
needs_setpriv = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root to give up, and setpriv"
)


def python(*prefix: str, code: str = BUILD) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*prefix, sys.executable, "-c", code], capture_output=True, text=True, timeout=600)


def namespaces() -> set[int]:
    """Return the network namespaces of all processes."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.stat(entry).st_ino)
        except OSError:
            continue
    return found


@needs_setpriv
def test_without_capabilities_it_builds_in_a_user_namespace() -> None:
    done = python(*WITHOUT_CAPABILITIES)
    assert done.stdout == "rootless True True 2\n", done.stderr


@needs_setpriv
def test_where_user_namespaces_are_forbidden_the_error_names_them() -> None:
    """The test forbids them in its own user namespace, so nothing else on the machine is affected."""
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces && exec " + " ".join(WITHOUT_CAPABILITIES) + ' "$@"'
    done = python("unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh")
    assert "LabError: cannot create a user namespace" in done.stderr
    assert "user.max_user_namespaces" in done.stderr
    assert "run as root" in done.stderr


def test_leaving_the_block_by_an_exception_ends_everything() -> None:
    sleeper: subprocess.Popen[bytes] | None = None

    def fail() -> None:
        nonlocal sleeper
        with Cluster(nodes=2, ranks_per_node=1) as cluster:
            sleeper = subprocess.Popen(cluster.inside(0, ["sleep", "600"]))
            while Path(f"/proc/{sleeper.pid}/comm").read_text() != "sleep\n":
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert sleeper is not None
    assert sleeper.wait(300) == -9


def test_the_machines_own_namespace_has_no_part_of_a_cluster() -> None:
    before = Path("/proc/net/dev").read_text().count(":")
    others = namespaces()
    with Cluster(nodes=2, ranks_per_node=1):
        assert Path("/proc/net/dev").read_text().count(":") == before
        assert namespaces() - others
    assert Path("/proc/net/dev").read_text().count(":") == before


def test_two_clusters_at_once_do_not_see_each_other() -> None:
    with Cluster(nodes=2, ranks_per_node=1) as one, Cluster(nodes=2, ranks_per_node=1) as other:
        one.link_down(0)
        assert transfer(other, 1, 0, 1000)["bytes"] == 1000


def test_invalid_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="nodes is 0; expected a number from 1 to 64"):
        Cluster(nodes=0)
    with pytest.raises(ValueError, match=r"ranks_per_node is 2\.0; expected"):
        Cluster(ranks_per_node=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="link is 'fast'; expected a rate"):
        Cluster(link="fast")
    with Cluster(nodes=2, ranks_per_node=1) as cluster:
        with pytest.raises(ValueError, match="node is 2; expected a number from 0 to 1"):
            cluster.set_link(2, link="1gbit")
        with pytest.raises(ValueError, match="loss is '1'"):
            cluster.set_link(loss="1")
        assert cluster.links[0].loss == "0%"


def test_a_cluster_that_is_not_up_raises_an_error() -> None:
    with pytest.raises(LabError, match="the cluster is not up"):
        Cluster().counters()


def test_if_the_network_process_is_killed_the_cluster_raises_an_error() -> None:
    with Cluster(nodes=2, ranks_per_node=1) as cluster:
        assert cluster._network is not None
        cluster._network.kill()
        with pytest.raises(LabError, match="the lab's network process ended"):
            cluster.counters()
