"""What a command writes: checked first, and replaced whole or not at all."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from zeropp.tools.atomic_files import check_file, make_folder, write_file

NOT_A_DISK = Path("/proc")
"""Nobody can make a file here, root neither."""


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (lambda folder: folder, "it is a folder; name a file in it"),
        (lambda folder: folder / "no" / "page.html", "is not a folder; make it, or name another"),
        (lambda folder: folder / "file" / "page.html", "is not a folder; make it, or name another"),
        (lambda folder: NOT_A_DISK / "page.html", "cannot be written: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused(
    place: Callable[[Path], Path], says: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(ValueError, match=says):
        check_file(place(tmp_path))


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (lambda folder: folder / "file", "a file is in its way"),
        (lambda folder: folder / "file" / "run", "Not a directory"),
        (lambda folder: NOT_A_DISK / "run", "No such file or directory"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused(
    place: Callable[[Path], Path], says: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(ValueError, match=f"cannot be a folder to write to: {says}"):
        make_folder(place(tmp_path))


def test_a_check_leaves_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    check_file(page)
    make_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []
    page.write_text("old")
    check_file(page)
    assert page.read_text() == "old"


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    """A limit on the size of files fails in the same way."""
    page = tmp_path / "page.html"
    page.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="what was there is as it was"):
            write_file(page, "new" * (1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert page.read_text() == "old"
    assert list(tmp_path.iterdir()) == [page]


def test_a_link_stays_one_and_a_device_is_written_to(tmp_path: Path) -> None:
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(page)
    write_file(link, "new")
    assert link.is_symlink()
    assert page.read_text() == "new"
    device = Path("/dev/null")
    check_file(device)
    write_file(device, "new")
    assert device.is_char_device()
