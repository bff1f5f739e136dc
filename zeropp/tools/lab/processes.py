"""Processes of labs: their identity, and the removal of processes whose lab has ended.

The id of a lab is the pid and the start time (in clock ticks since boot) of its network process, a pair that
is unique. Processes of jobs have the id in their environment, and the lab's folder has it in its name.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from tempfile import gettempdir

LAB_VARIABLE = "ZEROPP_LAB_RUN"
FOLDER_PREFIX = "zeropp-lab-"


def lab_id(network_pid: int) -> str:
    """Return the id of the lab with this network process."""
    return f"{network_pid}-{_start_ticks(network_pid)}"


def lab_folder(lab: str) -> Path:
    """Return the folder of a lab's files: exit codes, logs of torchrun, sockets."""
    return Path(gettempdir(), f"{FOLDER_PREFIX}{lab}")


def is_alive(lab: str) -> bool:
    """Return whether the lab's network process still runs."""
    pid, _, ticks = lab.partition("-")
    return pid.isdigit() and str(_start_ticks(int(pid))) == ticks


def find_orphans() -> dict[int, str]:
    """Return processes (pid: command) that have outlived their lab, if their environment is readable."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # it has ended, or belongs to another user
        prefix = f"{LAB_VARIABLE}=".encode()
        labs = [value.removeprefix(prefix).decode() for value in variables if value.startswith(prefix)]
        if labs and not is_alive(labs[0]):
            found[int(entry.name)] = command
    return found


def clean() -> dict[int, str]:
    """Kill the processes of labs that were killed, and remove their files. The kernel removes their networks.

    Returns the killed processes (pid: command).
    """
    found = find_orphans()
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for folder in Path(gettempdir()).glob(f"{FOLDER_PREFIX}*-*"):
        if not is_alive(folder.name.removeprefix(FOLDER_PREFIX)):
            shutil.rmtree(folder, ignore_errors=True)  # fails for folders of other users
    return found


def _start_ticks(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
