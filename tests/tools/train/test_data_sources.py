from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp.tools.train.data_sources import Stream, open_documents, standard_library


def everything(source: str | Path) -> list[int]:
    stream = Stream(open_documents(str(source)))
    return [int(token) for token in stream.read(0, len(stream))]


class Lists:
    """Documents in memory."""

    is_text = False

    def __init__(self, documents: list[list[int]]) -> None:
        self.documents = documents
        self.lengths = np.array([len(document) for document in documents], np.int64)

    def __getitem__(self, index: int, /) -> np.ndarray[Any, np.dtype[np.uint16]]:
        return np.array(self.documents[index], np.uint16)


@given(st.lists(st.lists(st.integers(0, 60_000), max_size=5), max_size=8), st.data())
def test_a_stream_concatenates_its_documents(documents: list[list[int]], data: st.DataObject) -> None:
    joined = [token for document in documents for token in document]
    stream = Stream(Lists(documents))
    assert len(stream) == len(joined)
    start = data.draw(st.integers(0, len(joined)))
    stop = data.draw(st.integers(start, len(joined)))
    read = stream.read(start, stop)
    assert read.dtype == np.int64
    assert read.tolist() == joined[start:stop]
    if joined:
        assert stream.largest() == max(joined)


def test_the_standard_library_has_a_fixed_order() -> None:
    files = standard_library()
    names = [file.name for file in files]
    assert {"argparse.py", "heapq.py"} <= set(names)
    assert any(file.match("json/decoder.py") for file in files)
    assert not any("site-packages" in file.parts or "test" in file.parts for file in files)
    assert files == standard_library()
    assert len(Stream(open_documents("stdlib"))) > 5_000_000


def test_text_files_are_bytes(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"two")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.txt").write_bytes("öne".encode())
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_bytes(b"not this")
    assert everything(tmp_path) == list("önetwo".encode())
    assert everything(tmp_path / "b.txt") == list(b"two")


def test_more_files_than_stay_open(tmp_path: Path) -> None:
    for n in range(100):
        (tmp_path / f"{n:03}.txt").write_bytes(bytes([n, n]))
    assert everything(tmp_path) == [n for n in range(100) for _ in range(2)]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_token_files(tmp_path: Path, dtype: Any) -> None:
    np.save(tmp_path / "0.npy", np.array([1, 50_000], dtype))
    np.save(tmp_path / "1.npy", np.array([3], dtype))
    assert everything(tmp_path) == [1, 50_000, 3]
    assert not open_documents(str(tmp_path)).is_text


def test_rows_of_a_dataset(tmp_path: Path) -> None:
    from datasets import Dataset  # type: ignore[import-untyped]

    Dataset.from_dict({"text": ["öne", "", "two"], "id": [1, 2, 3]}).save_to_disk(tmp_path / "text")
    assert everything(f"hf:{tmp_path}/text") == list("önetwo".encode())
    Dataset.from_dict({"input_ids": [[1, 50_000], [], [3]]}).save_to_disk(tmp_path / "tokens")
    assert everything(f"hf:{tmp_path}/tokens") == [1, 50_000, 3]
    assert not open_documents(f"hf:{tmp_path}/tokens").is_text


def test_files_without_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'missing.txt' does not exist; expected 'stdlib'"):
        open_documents("missing.txt")

    np.save(tmp_path / "a.npy", np.zeros((2, 2), np.uint16))
    with pytest.raises(ValueError, match=r"a.npy contains uint16 of shape \(2, 2\)"):
        open_documents(str(tmp_path))
    np.save(tmp_path / "a.npy", np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"a.npy contains float32 of shape \(2,\)"):
        open_documents(str(tmp_path / "a.npy"))

    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(ValueError, match=r"contains tokens \(a.npy\) and text \(b.txt\); .* separate them"):
        open_documents(str(tmp_path))

    class Trap:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("unpickled",))

    np.save(tmp_path / "c.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"cannot be read; expected token ids written by np\.save"):
        open_documents(str(tmp_path / "c.npy"))


def test_a_dataset_without_tokens_is_refused(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    Dataset.from_dict({"label": [1]}).save_to_disk(tmp_path / "labels")
    with pytest.raises(ValueError, match="has the columns label; expected 'input_ids' or 'text'"):
        open_documents(f"hf:{tmp_path}/labels")
    DatasetDict({"train": Dataset.from_dict({"text": ["a"]})}).save_to_disk(tmp_path / "splits")
    with pytest.raises(
        ValueError,
        match=r"contains the splits train; expected .* one split, such as 'hf:.*/train'",
    ):
        open_documents(f"hf:{tmp_path}/splits")
