"""Sources of tokens: documents (files, or rows of a dataset), read as one stream that is never in memory as a
whole."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer[Any]]

# Some distributions package these modules separately. Without them, the text is the same on every machine.
OPTIONAL_MODULES = {"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtle", "turtledemo"}
TEST_FOLDERS = {"test", "tests", "idle_test"}
OPEN_FILES = 64  # memory maps that stay open
ROWS_PER_READ = 1000  # rows of a dataset whose lengths are read in one go
TOKENS_PER_SCAN = 1 << 24  # tokens per read in the search for the largest id


class Documents(Protocol):
    """Documents of known lengths, read one at a time."""

    lengths: npt.NDArray[np.int64]
    is_text: bool
    """True if tokens are bytes (below 256)."""

    def __getitem__(self, index: int, /) -> Tokens: ...


class TextFiles:
    """Files as bytes, in the given order."""

    is_text = True

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = [file for file in files if file.stat().st_size]
        self.lengths = np.array([file.stat().st_size for file in self._files], np.int64)
        self._open = lru_cache(OPEN_FILES)(lambda index: np.memmap(self._files[index], np.uint8, mode="r"))

    def __getitem__(self, index: int, /) -> Tokens:
        return self._open(index)


class TokenFiles:
    """One-dimensional .npy files of integers, memory-mapped, in the given order."""

    is_text = False

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._open = lru_cache(OPEN_FILES)(lambda index: np.load(self._files[index], mmap_mode="r"))
        for index, file in enumerate(files):
            try:
                tokens = self._open(index)  # np.load refuses pickled objects
            except (OSError, ValueError, EOFError):
                raise ValueError(f"{file} cannot be read; expected token ids written by np.save") from None
            if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
                raise ValueError(
                    f"{file} contains {tokens.dtype} of shape {tokens.shape}; expected token ids: integers "
                    "in one dimension"
                )
        self.lengths = np.array([len(self._open(index)) for index in range(len(files))], np.int64)

    def __getitem__(self, index: int, /) -> Tokens:
        return self._open(index)  # type: ignore[no-any-return]


class DatasetRows:
    """Rows of a Hugging Face dataset on disk: token ids of the column `input_ids`, or else bytes of
    `text`."""

    def __init__(self, folder: Path) -> None:
        if importlib.util.find_spec("datasets") is None:
            raise ModuleNotFoundError(
                f"'hf:{folder}' needs datasets; install it with: pip install 'zeropp[hf-data]'"
            )
        import pyarrow.compute as arrow  # type: ignore[import-untyped]
        from datasets import Dataset, load_from_disk  # type: ignore[import-untyped]

        try:
            dataset = load_from_disk(folder)
        except Exception as error:  # damaged files can raise any type
            reason, _, _ = str(error).strip().partition("\n")
            raise ValueError(
                f"'hf:{folder}' cannot be read ({reason}); expected a folder written by Dataset.save_to_disk"
            ) from error
        if not isinstance(dataset, Dataset):
            raise ValueError(
                f"'hf:{folder}' contains the splits {', '.join(dataset)}; expected the folder of one split, "
                f"such as 'hf:{folder / next(iter(dataset))}'"
            )
        self.is_text = "input_ids" not in dataset.column_names
        self._column = "text" if self.is_text else "input_ids"
        if self._column not in dataset.column_names:
            raise ValueError(
                f"'hf:{folder}' has the columns {', '.join(dataset.column_names)}; expected 'input_ids' "
                "or 'text'"
            )
        self._rows = dataset.select_columns([self._column]).with_format("arrow")
        length_of = arrow.binary_length if self.is_text else arrow.list_value_length
        tables = self._rows.iter(batch_size=ROWS_PER_READ)
        parts = [length_of(table[self._column]).to_numpy() for table in tables]
        self.lengths = np.concatenate([np.empty(0, np.int64), *parts])

    def __getitem__(self, index: int, /) -> Tokens:
        row = self._rows[index][self._column][0]
        if self.is_text:
            return np.frombuffer(row.as_buffer(), np.uint8)
        return row.values.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


class Stream:
    """All documents, concatenated into one sequence of tokens."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        # [documents + 1]; the last element is the end of the last document
        self._starts = np.concatenate([[0], np.cumsum(documents.lengths)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens start .. stop - 1."""
        tokens = np.empty(stop - start, np.int64)
        filled, index = 0, bisect_right(self._starts, start) - 1
        while filled < len(tokens):
            begin = int(self._starts[index])
            part = self._documents[index][start + filled - begin : stop - begin]
            tokens[filled : filled + len(part)] = part
            filled += len(part)
            index += 1
        return tokens

    def largest(self) -> int:
        """Return the largest token id. Reads the whole stream."""
        starts = range(0, len(self), TOKENS_PER_SCAN)
        return max(int(self.read(start, min(start + TOKENS_PER_SCAN, len(self))).max()) for start in starts)


def open_documents(source: str) -> Documents:
    """Return the documents of `DataConfig.source`, in the same order on every machine."""
    if source == "stdlib":
        return TextFiles(standard_library())
    if source.startswith("hf:"):
        return DatasetRows(Path(source.removeprefix("hf:")).expanduser())
    path = Path(source).expanduser()
    if not path.exists():
        raise ValueError(
            f"data source {source!r} does not exist; expected 'stdlib', 'hf:' and a path, or a path"
        )
    files = [path] if path.is_file() else _files_in(path)
    token_files = [file for file in files if file.suffix == ".npy"]
    if token_files and len(token_files) < len(files):
        other = next(file for file in files if file.suffix != ".npy")
        raise ValueError(
            f"{path} contains tokens ({token_files[0].name}) and text ({other.name}); expected one of the "
            "two: separate them"
        )
    return TokenFiles(files) if token_files else TextFiles(files)


def standard_library() -> list[Path]:
    """Return the source files of Python's standard library, without tests and `OPTIONAL_MODULES`."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for name in sorted(sys.stdlib_module_names - OPTIONAL_MODULES):
        files += [file for file in (root / f"{name}.py",) if file.is_file()]
        files += _files_in(root / name, "*.py")
    return [file for file in files if not TEST_FOLDERS.intersection(file.relative_to(root).parts)]


def _files_in(folder: Path, pattern: str = "*") -> list[Path]:
    """Return all files in `folder`, at any depth, except hidden ones."""
    files = (file.relative_to(folder) for file in folder.rglob(pattern) if file.is_file())
    visible = [file for file in files if not any(part.startswith(".") for part in file.parts)]
    return [folder / file for file in sorted(visible, key=Path.as_posix)]
