"""Files and folders that a command writes: checked before its work, and replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

PROBE_BYTES = 4096  # on a full disk a file can be made, and nothing be written to it


def check_file(path: Path) -> None:
    """Raise unless a file can be written there: before minutes of work, not after.

    >>> check_file(Path("nowhere/report.html"))
    Traceback (most recent call last):
    ...
    ValueError: nowhere/report.html cannot be written: nowhere is not a folder; make it, or name another
    """
    if path.is_dir():
        raise ValueError(f"{path} cannot be written: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: {path.parent} is not a folder; make it, or name another")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{path} cannot be written: it is read-only; name another file")
    if _is_replaced(path):
        try:
            _probe(path.parent)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}; name another place") from None


def make_folder(path: Path) -> None:
    """Make the folder if it is not there, and raise unless files can be written to it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        _probe(path)
    except OSError as error:
        why = "a file is in its way" if isinstance(error, FileExistsError) else error.strerror
        raise ValueError(f"{path} cannot be a folder to write to: {why}; name another") from None


def write_file(path: Path, text: str) -> None:
    """Write beside the file, then rename: whatever happens, there is the old one or the new one."""
    if not _is_replaced(path):
        path.write_text(text)
        return
    target = path.resolve()  # a link stays one
    beside = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        beside.write_text(text)
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror}; what was there is as it was", str(path)) from None


def _is_replaced(path: Path) -> bool:
    """Not a device or a pipe, such as /dev/stdout."""
    return path.is_file() or not path.exists()


def _probe(folder: Path) -> None:
    """Write a file, and remove it."""
    probe = folder / f".zeropp-probe-{os.getpid()}"
    try:
        probe.write_bytes(bytes(PROBE_BYTES))
    finally:
        probe.unlink(missing_ok=True)
