"""Checkpoints: torch's DCP for tensors, JSON for the rest, written beside the training, whole or not at all.

    FOLDER/checkpoints/step-00000200/            complete
        state.json                               step, position in the data, configuration
        __0_0.distcp, __1_0.distcp, ...          the shards of each rank
        .metadata                                which shard is where
        zeropp-0.pt, zeropp-1.pt, ...            what zeropp keeps on each rank, if its Config keeps anything
    FOLDER/checkpoints/step-00000300.partial/    being written, or left by a crash

[Note: Whole or not at all]
A folder gets its final name, in one rename, after every rank's files are on the disk. Only then are older
ones removed. So whenever the job dies, the newest folder without `.partial` is whole.

[Note: Beside the training]
`save` copies the tensors, and returns. A thread of every rank writes them, and agrees with the others over a
gloo group of its own, so that its collectives never mix with those of the training.

[Note: What is unpickled]
DCP stores tensors with torch.save and reads them with weights_only=True; anything else it would pickle, so
only tensors are given to it. What remains is its own index, `.metadata`, which is a pickle;
`MetadataUnpickler` reads it and refuses every name but those that the index is made of. No code of a
checkpoint is ever run.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from ..atomic_files import make_folder
from .world import World

CHECKPOINTS = "checkpoints"
"""The folder of them, in the folder of a run."""
STATE_FILE, KEPT_FILE = "state.json", "zeropp-{rank}.pt"
PARTIAL = ".partial"
FORMAT = 1
MODULE = "torch.distributed.checkpoint"
UNPICKLED = {
    (f"{MODULE}.metadata", "Metadata"),
    (f"{MODULE}.metadata", "StorageMeta"),
    (f"{MODULE}.metadata", "TensorStorageMetadata"),
    (f"{MODULE}.metadata", "ChunkStorageMetadata"),
    (f"{MODULE}.metadata", "TensorProperties"),
    (f"{MODULE}.metadata", "MetadataIndex"),
    (f"{MODULE}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{MODULE}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}

Tensors = dict[str, Any]
"""Nested; all leaves are tensors."""


class CheckpointError(OSError):
    """A checkpoint cannot be written or read."""


class Checkpoints:
    """The checkpoints of one run. Make it on every rank, and call its methods on every rank, too."""

    def __init__(self, folder: Path, keep: int, world: World) -> None:
        self.folder = folder
        self._keep = keep
        self._world = world
        self._group = dist.new_group(backend="gloo", group_desc="zeropp_checkpoints")
        self._writing: tuple[Path, Future[Any]] | None = None
        world.first_does(self._prepare)

    def _prepare(self) -> None:
        make_folder(self.folder)
        for left_over in self.folder.glob(f"step-*{PARTIAL}"):
            shutil.rmtree(left_over)

    def last(self) -> Path | None:
        """The newest whole one, as the first rank sees it."""
        step = self._world.from_first(max(steps_in(self.folder), default=-1) if self._world.is_first else 0)
        return None if step < 0 else self.path_of(step)

    def path_of(self, step: int) -> Path:
        return self.folder / name_of(step)

    def save(
        self, step: int, tensors: Tensors, state: dict[str, Any], kept: Mapping[str, Any] | None = None
    ) -> None:
        """Start to write; the tensors may change as soon as this returns. [Note: Beside the training]

        `kept` is what only this rank needs: ZeroPP.state_dict(). All ranks give it, or none does.
        """
        self.wait()
        path = self.path_of(step)
        partial = path.with_name(path.name + PARTIAL)
        if self._world.is_first:
            partial.mkdir(exist_ok=True)
            _write_synced(
                partial / STATE_FILE, json.dumps({"format": FORMAT, "step": step, **state}, indent=1)
            )
        if kept is not None:
            dist.barrier(self._group)  # the folder is there
            torch.save(kept, partial / KEPT_FILE.format(rank=self._world.rank))
        writer = FileSystemWriter(partial, sync_files=True)
        future = async_save(tensors, storage_writer=writer, process_group=self._group)
        assert isinstance(future, Future)  # with a stager of another kind it would be something else
        self._writing = (path, future)

    def poll(self) -> None:
        """Complete what has been written meanwhile; call it now and then."""
        if self._writing is not None and self._writing[1].done():
            self.wait()

    def wait(self) -> None:
        """Until the checkpoint that is being written is complete."""
        if self._writing is None:
            return
        (path, future), self._writing = self._writing, None
        try:
            future.result()
            if self._world.is_first:
                self._complete(path)
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"{path} could not be written: {_reason(error)}. Older ones are whole"
            ) from error

    def load(self, path: Path, tensors: Tensors) -> None:
        """Fill `tensors`, which may be sharded in another way than those that were saved."""
        read_tensors(path, tensors, self._group)

    def load_kept(self, path: Path) -> dict[str, Any] | None:
        """What `save` got as `kept` on this rank; None if it was nothing."""
        file = path / KEPT_FILE.format(rank=self._world.rank)
        try:
            return torch.load(file, weights_only=True) if file.exists() else None
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read: {file.name}: {_reason(error)}") from error

    def _complete(self, path: Path) -> None:
        """See [Note: Whole or not at all]."""
        shutil.rmtree(path, ignore_errors=True)  # of a run that was further, before an older one was resumed
        path.with_name(path.name + PARTIAL).rename(path)
        folder = os.open(self.folder, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        for step in sorted(steps_in(self.folder))[: -self._keep]:
            shutil.rmtree(self.path_of(step))


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """
    >>> step_of("step-00000200"), step_of("step-00000300.partial")
    (200, None)
    """
    match = re.fullmatch(r"step-(\d{8,})", name)
    return None if match is None else int(match[1])


def steps_in(folder: Path) -> list[int]:
    """Steps that whole checkpoints were saved after."""
    steps = (step_of(entry.name) for entry in folder.glob("step-*"))
    return [step for step in steps if step is not None]


def read_tensors(path: Path, tensors: Tensors, group: dist.ProcessGroup | None = None) -> None:
    """Fill `tensors`; all ranks of the group call it, or a process that has no ranks around it."""
    reader = _Reader(path)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is the intent
            load(tensors, storage_reader=reader, process_group=group)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from error


def read_state(path: Path, *keys: str) -> dict[str, Any]:
    """What is not a tensor; these keys must be there."""
    try:
        state = json.loads((path / STATE_FILE).read_text())
    except OSError as error:
        raise CheckpointError(
            f"{path} is no checkpoint of zeropp train: {STATE_FILE}: {error.strerror}"
        ) from None
    except ValueError as error:  # not JSON, or not text
        raise CheckpointError(f"{path} cannot be read: {STATE_FILE}: {error}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path / STATE_FILE} has another format than {FORMAT}: of another version?")
    if missing := [key for key in keys if key not in state]:
        raise CheckpointError(f"{path} cannot be read: {STATE_FILE} has no {missing[0]!r}")
    return state


def _reason(error: BaseException) -> str:
    """What is wrong, in one line. DCP's error has a traceback for each rank; torch.load's advises to run what
    is in the file."""
    if isinstance(error, CheckpointException) and error.failures:
        _, (error, _) = min(error.failures.items())
    if isinstance(error, (pickle.UnpicklingError, EOFError)) or "PytorchStreamReader" in str(error):
        return "a file of it is damaged"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    first_line, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first_line}"


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


class MetadataUnpickler(pickle.Unpickler):
    """See [Note: What is unpickled]."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in UNPICKLED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place there")


class _Reader(FileSystemReader):
    """Has read the index before DCP asks for it: that one logs an error, and looks for one of each rank."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            with (path / ".metadata").open("rb") as file:
                metadata = MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"it holds {type(metadata).__name__}")
            self._metadata = metadata
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: .metadata: {error.strerror}") from None
        except Exception as error:  # a damaged pickle raises anything
            raise CheckpointError(f"{path} cannot be read: .metadata is damaged: {error}") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata
