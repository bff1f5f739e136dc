"""Output files and folders of commands: checked before the work starts, and replaced atomically."""

from __future__ import annotations

import os
from pathlib import Path

PROBE_BYTES = 4096  # a full disk still accepts an empty file


def check_file(path: Path) -> None:
    """Raise a ValueError if `path` cannot be written. Commands call this before minutes of work.

    >>> check_file(Path("nowhere/report.html"))
    Traceback (most recent call last):
    ...
    ValueError: nowhere/report.html cannot be written: nowhere is not a folder; create it, or choose another
    """
    if path.is_dir():
        raise ValueError(f"{path} cannot be written: it is a folder; choose a file in it")
    if not path.parent.is_dir():
        raise ValueError(
            f"{path} cannot be written: {path.parent} is not a folder; create it, or choose another"
        )
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{path} cannot be written: it is read-only; choose another file")
    if _is_replaced(path):
        try:
            _probe(path.parent)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}; choose another folder") from None


def make_folder(path: Path) -> None:
    """Make the folder if it is missing, and raise a ValueError if it is not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        _probe(path)
    except OSError as error:
        why = "a file has this name" if isinstance(error, FileExistsError) else error.strerror
        raise ValueError(f"{path} is not a writable folder: {why}; choose another") from None


def write_file(path: Path, text: str) -> None:
    """Write `text` to a temporary file and rename it to `path`, so that a failure leaves the old file."""
    if not _is_replaced(path):
        path.write_text(text)
        return
    target = path.resolve()  # the file behind a link, so that the rename keeps the link
    temporary = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        temporary.write_text(text)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror}; the old file is unchanged", str(path)) from None


def _is_replaced(path: Path) -> bool:
    """Return whether a rename may replace `path`: not if it is a device or a pipe, such as /dev/stdout."""
    return path.is_file() or not path.exists()


def _probe(folder: Path) -> None:
    """Write and remove a file in `folder`."""
    probe = folder / f".zeropp-probe-{os.getpid()}"
    try:
        probe.write_bytes(bytes(PROBE_BYTES))
    finally:
        probe.unlink(missing_ok=True)
