"""Output that several commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeropp.tools.cli.output import FILE_WIDTH, check_files, print_sentences, table_console


def test_tables_in_a_file_have_a_fixed_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # a terminal of the launcher, which does not show the file
    console = table_console()
    assert console.width == FILE_WIDTH
    print_sentences(console, ["one [of] two", "two"])
    assert capsys.readouterr().out == "- one [of] two\n- two\n"


def test_every_given_file_is_checked(tmp_path: Path) -> None:
    check_files(None, tmp_path / "page.html", None)
    with pytest.raises(ValueError, match="it is a folder"):
        check_files(None, tmp_path / "page.html", tmp_path)
