"""Which processes belong to which lab, and the end of those whose lab is gone.

A lab is named after its network process: its pid and the time it started, in clock ticks since boot, which no
other process can share. Jobs carry the name in their environment; the folder of the lab is named after it.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from tempfile import gettempdir

RUN_VARIABLE = "ZEROPP_LAB_RUN"
FOLDER_PREFIX = "zeropp-lab-"


def run_id(network_pid: int) -> str:
    """The name of the lab with this network process."""
    return f"{network_pid}-{_start_ticks(network_pid)}"


def folder_of(run: str) -> Path:
    """Where the lab's files are: exit codes, logs of torchrun, sockets."""
    return Path(gettempdir(), f"{FOLDER_PREFIX}{run}")


def is_alive(run: str) -> bool:
    """Whether the lab's network process still runs."""
    pid, _, ticks = run.partition("-")
    return pid.isdigit() and str(_start_ticks(int(pid))) == ticks


def find_left_over() -> dict[int, str]:
    """Processes (pid: command) that a lab started and that outlived it. Only those that we may look into."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # gone, or somebody else's
        prefix = f"{RUN_VARIABLE}=".encode()
        runs = [value.removeprefix(prefix).decode() for value in variables if value.startswith(prefix)]
        if runs and not is_alive(runs[0]):
            found[int(entry.name)] = command
    return found


def clean() -> dict[int, str]:
    """Kill what killed labs left, and remove their files; the kernel then removes their network.

    Returns the processes that were killed."""
    found = find_left_over()
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for folder in Path(gettempdir()).glob(f"{FOLDER_PREFIX}*-*"):
        if not is_alive(folder.name.removeprefix(FOLDER_PREFIX)):
            shutil.rmtree(folder, ignore_errors=True)  # another user's stays
    return found


def _start_ticks(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
