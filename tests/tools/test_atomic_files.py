"""Output files of commands: the checks, and atomic replacement."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from zeropp.tools.atomic_files import check_file, make_folder, write_file

NOT_A_DISK = Path("/proc")
"""A folder in which no user, not even root, can create a file."""


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (lambda folder: folder, "it is a folder; choose a file in it"),
        (lambda folder: folder / "no" / "page.html", "is not a folder; create it, or choose another"),
        (lambda folder: folder / "file" / "page.html", "is not a folder; create it, or choose another"),
        (lambda folder: NOT_A_DISK / "page.html", "cannot be written: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused(
    place: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(ValueError, match=message):
        check_file(place(tmp_path))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (lambda folder: folder / "file", "a file has this name"),
        (lambda folder: folder / "file" / "run", "Not a directory"),
        (lambda folder: NOT_A_DISK / "run", "No such file or directory"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused(
    place: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(ValueError, match=f"is not a writable folder: {message}"):
        make_folder(place(tmp_path))


def test_a_check_leaves_no_files(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    check_file(page)
    make_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []
    page.write_text("old")
    check_file(page)
    assert page.read_text() == "old"


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """A limit on file sizes fails in the same way as a full disk."""
    page = tmp_path / "page.html"
    page.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="the old file is unchanged"):
            write_file(page, "new" * (1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert page.read_text() == "old"
    assert list(tmp_path.iterdir()) == [page]


def test_a_link_stays_a_link_and_a_device_stays_a_device(tmp_path: Path) -> None:
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(page)
    write_file(link, "new")
    assert link.is_symlink()
    assert page.read_text() == "new"
    device = Path("/dev/null")
    check_file(device)
    write_file(device, "new")
    assert device.is_char_device()
