"""A driver for Triton in the place of CUDA's: launches compile as for a GPU, and run in the interpreter.

    with ptx_devices("sm_80", "sm_90"):     # devices 0 and 1
        launch.encode(fmt, source, out)     # on CPU tensors

Triton itself does all that comes before the device. It decides which arguments are constants, divisible by 16
or not specialized, compiles, runs ptxas, and keeps compiled kernels. The driver has CUDA's limits on a grid,
on shared memory and on the widths of arguments.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor
from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found, import-untyped, unused-ignore]
from triton.backends.driver import GPUDriver  # type: ignore[import-not-found, import-untyped, unused-ignore]

from .errors import LaunchError
from .machine import Launch, run
from .memory import GlobalMemory
from .parse import Kernel, parse

TARGETS = ("sm_80", "sm_90", "sm_100")
MAX_GRID = (2**31 - 1, 65_535, 65_535)
MAX_SHARED_BYTES = 99 * 1024
"""What a program may have on every GPU from sm_80 on."""
MAX_THREADS = 1024
INTEGERS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "u8": 8, "u16": 16, "u32": 32, "u64": 64}

Change = Callable[[str], str]
"""A change of the PTX text before it runs."""


@dataclass(frozen=True)
class Run:
    """One launch that was executed."""

    device: int
    stream: int
    kernel: str
    """Hash of the compiled kernel."""
    grid: tuple[int, int, int]
    ptx: str = field(repr=False)


@dataclass
class PtxDriver(GPUDriver):  # type: ignore[misc]
    """Devices that differ in their target. There is one stream, 0, and a launch is done when it returns."""

    targets: tuple[str, ...]
    change: Change = str
    current_device: int = 0
    only_last: int | None = None
    """Number of last programs of a grid to run; None: all."""
    runs: list[Run] = field(default_factory=list)
    loaded: tuple[str, str] = ("", "")
    """Hash and PTX of the kernel that Triton is about to load."""

    # What Triton asks a driver for.

    def __post_init__(self) -> None:
        self.utils = self
        self.launcher_cls = Launcher

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_device(self) -> int:
        return self.current_device

    def set_current_device(self, device: int) -> None:
        self.current_device = device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(self.targets[self.current_device].removeprefix("sm_")), 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MAX_SHARED_BYTES}

    def map_python_to_cpp_type(self, kind: str) -> str:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: int
    ) -> tuple[Any, Any, int, int, int]:
        """Module, function, registers, spills and the most threads. The function is hash and PTX."""
        digest, text = self.loaded
        return None, (digest, self.change(text)), 0, 0, MAX_THREADS

    # Hooks of Triton.

    def before_load(
        self, module: Any, function: Any, name: str, files: Mapping[str, str], digest: str
    ) -> None:
        """The files that Triton has made of a kernel; a driver is given the machine code only."""
        (path,) = (Path(file) for each, file in files.items() if each.endswith(".ptx"))
        self.loaded = digest, path.read_text()


class Launcher:
    """What Triton calls to launch one compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.signature: dict[str, str] = source.signature
        self.metadata = metadata
        self.driver: PtxDriver = triton.runtime.driver.active

    def __call__(self, x: int, y: int, z: int, stream: int, function: tuple[str, str], *others: Any) -> None:
        arguments = others[4:]
        digest, text = function
        grid = _checked_grid(x, y, z)
        kernel = _parsed(text)
        self._check(kernel)
        kinds = self.signature.values()
        given = [
            (kind, argument) for kind, argument in zip(kinds, arguments, strict=True) if kind != "constexpr"
        ]
        tensors = [argument for _, argument in given if isinstance(argument, Tensor)]
        bits = [_argument_bits(kind, argument) for kind, argument in given]
        scratch = [0, 0]  # of nothing: _check
        launch = Launch(kernel, grid, [*bits, *scratch], GlobalMemory(tensors), self.metadata.shared)
        run(launch, self.driver.only_last)
        self.driver.runs.append(Run(self.driver.current_device, stream, digest, grid, text))

    def _check(self, kernel: Kernel) -> None:
        metadata = self.metadata
        if kernel.threads != metadata.num_warps * 32:
            raise LaunchError(
                f"{kernel.threads} threads in the PTX, {metadata.num_warps} warps in the launch"
            )
        unused = (metadata.global_scratch_size, metadata.profile_scratch_size, metadata.num_ctas - 1)
        if any(unused) or metadata.launch_cooperative_grid or metadata.launch_pdl:
            raise LaunchError("scratch memory, clusters and cooperative grids are not run here")


_parsed = cache(parse)


def _checked_grid(*grid: int) -> tuple[int, int, int]:
    if any(not 0 < size <= most for size, most in zip(grid, MAX_GRID, strict=True)):
        raise LaunchError(f"grid {grid}; CUDA launches at most {MAX_GRID}")
    x, y, z = grid
    if x * y * z >= 2**31:  # Triton's launcher multiplies them as 32-bit integers, and launches nothing
        raise LaunchError(f"grid {grid} has 2^31 programs or more, which Triton does not launch")
    return x, y, z


def _argument_bits(kind: str, argument: Any) -> int:
    """A parameter, as Triton's launcher passes it to CUDA."""
    if kind.startswith("*"):
        address: int = argument.data_ptr()
        return address
    if kind == "fp32":
        return int.from_bytes(struct.pack("<f", argument), "little")
    width = INTEGERS[kind]
    low, high = (0, 1 << width) if kind[0] == "u" else (-(1 << width - 1), 1 << width - 1)
    if not low <= argument < high:
        raise LaunchError(f"{argument} does not fit into {kind}")
    return int(argument) & (1 << width) - 1


@contextmanager
def ptx_devices(*targets: str, change: Change = str) -> Iterator[PtxDriver]:
    """Triton launches on these devices, numbered from 0, with kernels changed by `change` before they run."""
    driver = PtxDriver(targets, change)
    hooks = triton.knobs.runtime.kernel_load_start_hook
    config = triton.runtime.driver
    before = config._active
    _forget_kernels()
    config.set_active(driver)
    hooks.add(driver.before_load)
    try:
        yield driver
    finally:
        hooks.remove(driver.before_load)
        config._active = before
        _forget_kernels()


def _forget_kernels() -> None:
    """Triton keeps what it has loaded, by device number."""
    from zeropp.quant.gpu import kernels

    for kernel in (kernels.encode_kernel, kernels.decode_kernel, kernels.recode_kernel):
        kernel.device_caches.clear()
