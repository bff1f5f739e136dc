"""A device with streams, for machines that have none: torch's PrivateUse1 with host memory behind it.

The C++ beside this file is built once, with g++, into a folder `build` that git ignores. `load()` makes the
device "streamed" known to torch, in this process, for good: only in ranks that do nothing else.

What it catches (see [Note: Clocks] in clocks.h):

- *conflicts*: two accesses to the same memory that no event, wait or host synchronization orders, also if it
  went back to the allocator in between.
- *synchronizations*: whatever would make the host wait for a GPU.

Data of a collective arrives when somebody waits for it, a non-blocking copy to pinned memory when the host
has learnt from an event that it is done. Freed and fresh memory is scribbled over. The device never gets
ahead by itself: an event has passed after a synchronization, or after `finish()`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.backend_registration import rename_privateuse1_backend

NAME = "streamed"
BACKEND = f"cpu:gloo,{NAME}:{NAME}"
"""For init_process_group."""
MAX_REPORTS = 1000
"""Reports of one kind that are kept while watching, at most."""
HERE = Path(__file__).parent
SOURCES = [HERE / name for name in ("machine.cpp", "device.cpp", "collectives.cpp")]
LESS = HERE / "less"
"""Headers that are read in place of torch's."""
HEADERS = [HERE / name for name in ("clocks.h", "machine.h")] + [LESS / "ATen" / "ATen.h"]


@dataclass
class Report:
    """What the device has to say about one operation."""

    kind: str
    """"conflict" or "synchronization"."""
    text: str
    stack: list[traceback.FrameSummary]

    def is_from(self, folder: Path) -> bool:
        """Whether code in `folder` is on the stack."""
        return any(Path(frame.filename).is_relative_to(folder) for frame in self.stack)

    def __str__(self) -> str:
        calls = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(self.stack[-8:]))
        return f"{self.kind}: {self.text} [{calls}]"


@dataclass
class Watch:
    """What was reported while it was on."""

    reports: list[Report] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """How many reports there are, by kind."""

    @property
    def conflicts(self) -> list[str]:
        return [str(report) for report in self.reports if report.kind == "conflict"]

    def synchronizations(self, folder: Path) -> list[str]:
        """Reports of a host that waited, in code of `folder`."""
        found = [report for report in self.reports if report.kind == "synchronization"]
        return [str(report) for report in found if report.is_from(folder)]


_watches: list[Watch] = []
_native: Any = None
_capturing = False


@contextmanager
def watch() -> Iterator[Watch]:
    """Collects the reports of the device, from all threads, about what is launched from now on."""
    torch.accelerator.synchronize()
    watching = Watch()
    _watches.append(watching)
    try:
        yield watching
    finally:
        _watches.remove(watching)


def finish() -> None:
    """Let the device do all that was launched. The host learns of it when it asks an event."""
    _native.finish()


@contextmanager
def capturing() -> Iterator[None]:
    """As if streams were being captured into a graph."""
    global _capturing
    _capturing = True
    try:
        yield
    finally:
        _capturing = False


def build() -> Path:
    """The compiled extension. What is built from the same sources already is taken from the build folder."""
    from torch.utils.cpp_extension import include_paths

    folder = HERE / "build"
    folder.mkdir(exist_ok=True)
    made_of = f"{torch.__version__} {sys.version}".encode()
    made_of += b"".join(file.read_bytes() for file in (*HEADERS, *SOURCES))
    target = folder / f"{NAME}_{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if target.exists():
        return target
    temporary = target.with_suffix(f".{os.getpid()}")  # another session may be making the same
    includes = [f"-I{path}" for path in (LESS, *include_paths(), sysconfig.get_path("include"))]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    flags = ["-std=c++20", "-O0", "-fPIC", "-w", abi, "-DUSE_DISTRIBUTED"]
    libraries = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    command = [
        *("g++", "-shared", *flags, f"-DTORCH_EXTENSION_NAME={NAME}_native", *includes),
        *("-x", "c++", "-", f"-L{Path(torch.__file__).parent / 'lib'}", *libraries, "-o", str(temporary)),
    ]
    # As one file: most of the time goes into torch's headers, which all of them include.
    together = "".join(f'#include "{source}"\n' for source in SOURCES)
    if subprocess.run(command, input=together, text=True).returncode != 0:
        raise RuntimeError(f"g++ could not build {target.name}")
    os.replace(temporary, target)
    return target


def why_not() -> str | None:
    """Why the device cannot be had here, or None."""
    return None if shutil.which("g++") else "the device with streams needs g++"


def load() -> None:
    """Make the device known to torch. Doing it twice is harmless."""
    global _native
    if _native is not None:
        return
    spec = importlib.util.spec_from_file_location(f"{NAME}_native", build())
    assert spec is not None
    assert spec.loader is not None
    _native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_native)
    _native.on_report(_on_report)
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())  # type: ignore[no-untyped-call]
    dist.Backend.register_backend(NAME, _make_backend, devices=[NAME])


def _on_report(kind: str, text: str) -> None:
    # A missing wait makes thousands of conflicts; the first ones say it all.
    watching = [each for each in _watches if each.counts[kind] < MAX_REPORTS]
    if watching:
        # By hand: `traceback.extract_stack` asks the file system for the age of every file on the stack.
        stack = [
            traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name, lookup_line=False)
            for frame, line in traceback.walk_stack(sys._getframe(1))
        ]
        for each in watching:
            each.reports.append(Report(kind, text, stack[::-1]))
            each.counts[kind] += 1


def _make_backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return _native.wrap(dist.ProcessGroupGloo(store, rank, size, timeout))


def _device_module() -> ModuleType:
    """torch.streamed: what FSDP2 and others ask a device's module for."""
    module = ModuleType(f"torch.{NAME}")
    device = torch.device(NAME, 0)

    def make_stream(priority: int = 0) -> torch.Stream:
        return torch.Stream(device, priority=priority)

    def make_event(**options: Any) -> torch.Event:
        return torch.Event(device, **options)

    functions: dict[str, Any] = {
        "Stream": make_stream,
        "Event": make_event,
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "stream": lambda stream: stream,  # a torch.Stream is a context
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: _capturing,
        "manual_seed_all": lambda seed: None,  # random numbers are made on the CPU
        "_is_in_bad_fork": lambda: False,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module
