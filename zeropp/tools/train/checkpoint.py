"""Checkpoints: torch's DCP for tensors, JSON for other state. They are asynchronous and atomic.

    FOLDER/checkpoints/step-00000200/            complete
        state.json                               step, position in the data, configuration
        __0_0.distcp, __1_0.distcp, ...          the shards of each rank
        .metadata                                DCP's index of the shards
        zeropp-0.pt, zeropp-1.pt, ...            each rank's zeropp state, if the Config has any
    FOLDER/checkpoints/step-00000300.partial/    incomplete: still written, or left by a crash

[Note: Atomic checkpoints]
A folder gets its final name in one rename, after every rank has synced its files to disk. Older checkpoints
are removed after the rename. So at any crash, the newest folder without `.partial` is complete.

[Note: Asynchronous saves]
`save` copies the tensors and returns. On every rank, a thread writes the copy concurrently with the training.
These threads communicate over a separate gloo group, so their collectives cannot mix with those of the
training.

[Note: Safe unpickling]
DCP stores tensors with torch.save and reads them with weights_only=True. It pickles any other object, so DCP
gets tensors only. Its index, `.metadata`, is a pickle too: `MetadataUnpickler` reads it and refuses every
name that DCP's index does not contain. Loading a checkpoint never runs code from it.
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
"""Name of the folder of checkpoints in a run folder."""
STATE_FILE, ZEROPP_FILE = "state.json", "zeropp-{rank}.pt"
PARTIAL = ".partial"
FORMAT = 1
MODULE = "torch.distributed.checkpoint"
ALLOWED_NAMES = {
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
"""A nested dict whose leaves are tensors."""


class CheckpointError(OSError):
    """A checkpoint cannot be written or read."""


class Checkpoints:
    """The checkpoints of one run. Every rank constructs it and calls every method."""

    def __init__(self, folder: Path, keep: int, world: World) -> None:
        self.folder = folder
        self._keep = keep
        self._world = world
        self._group = dist.new_group(backend="gloo", group_desc="zeropp_checkpoints")
        self._writing: tuple[Path, Future[Any]] | None = None
        world.run_on_first(self._prepare)

    def _prepare(self) -> None:
        make_folder(self.folder)
        for partial in self.folder.glob(f"step-*{PARTIAL}"):
            shutil.rmtree(partial)

    def last(self) -> Path | None:
        """Return the newest complete checkpoint that the first rank sees."""
        step = self._world.broadcast_from_first(
            max(steps_in(self.folder), default=-1) if self._world.is_first else 0
        )
        return None if step < 0 else self.path_of(step)

    def path_of(self, step: int) -> Path:
        return self.folder / name_of(step)

    def save(
        self,
        step: int,
        tensors: Tensors,
        state: dict[str, Any],
        zeropp_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Start to write a checkpoint. The tensors may change after the return. [Note: Asynchronous saves]

        `zeropp_state` is this rank's `ZeroPP.state_dict()`. Either all ranks pass one, or none does.
        """
        self.wait()
        path = self.path_of(step)
        partial = path.with_name(path.name + PARTIAL)
        if self._world.is_first:
            partial.mkdir(exist_ok=True)
            _write_synced(
                partial / STATE_FILE, json.dumps({"format": FORMAT, "step": step, **state}, indent=1)
            )
        if zeropp_state is not None:
            dist.barrier(self._group)  # until the first rank has made the folder
            torch.save(zeropp_state, partial / ZEROPP_FILE.format(rank=self._world.rank))
        writer = FileSystemWriter(partial, sync_files=True)
        future = async_save(tensors, storage_writer=writer, process_group=self._group)
        assert isinstance(future, Future)  # another type only with an asynchronous stager
        self._writing = (path, future)

    def poll(self) -> None:
        """Complete the current checkpoint if all its files are written. Call this in every step."""
        if self._writing is not None and self._writing[1].done():
            self.wait()

    def wait(self) -> None:
        """Wait until the current checkpoint is complete."""
        if self._writing is None:
            return
        (path, future), self._writing = self._writing, None
        try:
            future.result()
            if self._world.is_first:
                self._complete(path)
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"{path} could not be written: {_reason(error)}. Older checkpoints are complete"
            ) from error

    def load(self, path: Path, tensors: Tensors) -> None:
        """Fill `tensors`. Their sharding may differ from that of the saved tensors."""
        read_tensors(path, tensors, self._group)

    def load_zeropp_state(self, path: Path) -> dict[str, Any] | None:
        """Return the `zeropp_state` that this rank has saved, or None."""
        file = path / ZEROPP_FILE.format(rank=self._world.rank)
        try:
            return torch.load(file, weights_only=True) if file.exists() else None
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read: {file.name}: {_reason(error)}") from error

    def _complete(self, path: Path) -> None:
        """See [Note: Atomic checkpoints]."""
        shutil.rmtree(path, ignore_errors=True)  # an earlier run may have saved this step
        path.with_name(path.name + PARTIAL).rename(path)
        folder = os.open(self.folder, os.O_RDONLY)
        os.fsync(folder)  # a rename is on the disk after an fsync of the parent folder
        os.close(folder)
        for step in sorted(steps_in(self.folder))[: -self._keep]:
            shutil.rmtree(self.path_of(step))


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a complete checkpoint.

    >>> step_of("step-00000200"), step_of("step-00000300.partial")
    (200, None)
    """
    match = re.fullmatch(r"step-(\d{8,})", name)
    return None if match is None else int(match[1])


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in `folder`."""
    steps = (step_of(entry.name) for entry in folder.glob("step-*"))
    return [step for step in steps if step is not None]


def read_tensors(path: Path, tensors: Tensors, group: dist.ProcessGroup | None = None) -> None:
    """Fill `tensors` from a checkpoint. Collective over `group`; also works in one process without ranks."""
    reader = _Reader(path)
    try:
        with warnings.catch_warnings():
            # An export has no ranks, which is no reason to warn
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(tensors, storage_reader=reader, process_group=group)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from error


def read_state(path: Path, *keys: str) -> dict[str, Any]:
    """Return the contents of state.json, and raise if one of `keys` is missing."""
    try:
        state = json.loads((path / STATE_FILE).read_text())
    except OSError as error:
        raise CheckpointError(
            f"{path} is not a checkpoint of zeropp train: {STATE_FILE}: {error.strerror}"
        ) from None
    except ValueError as error:  # not JSON, or not text
        raise CheckpointError(f"{path} cannot be read: {STATE_FILE}: {error}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path / STATE_FILE} has another format than {FORMAT}: another version of zeropp may have "
            "written it; use that version to read it"
        )
    if missing := [key for key in keys if key not in state]:
        raise CheckpointError(f"{path} cannot be read: {STATE_FILE} has no {missing[0]!r}")
    return state


def _reason(error: BaseException) -> str:
    """Return the cause of `error` in one line.

    DCP's error contains a traceback of each rank. torch.load's error recommends weights_only=False, which
    would run code from the file."""
    if isinstance(error, CheckpointException) and error.failures:
        _, (error, _) = min(error.failures.items())
    if isinstance(error, (pickle.UnpicklingError, EOFError)) or "PytorchStreamReader" in str(error):
        return "one of its files is damaged"
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
    """See [Note: Safe unpickling]."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in ALLOWED_NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which DCP's index does not use")


class _Reader(FileSystemReader):
    """A reader that loads the index with `MetadataUnpickler`, before DCP does.

    DCP's own code would unpickle any name, and would log an error for a missing index of each rank."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            with (path / ".metadata").open("rb") as file:
                metadata = MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"it contains a {type(metadata).__name__}")
            self._metadata = metadata
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: .metadata: {error.strerror}") from None
        except Exception as error:  # a damaged pickle can raise any type
            raise CheckpointError(f"{path} cannot be read: .metadata is damaged: {error}") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata
